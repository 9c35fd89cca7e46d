// llama.cpp for `benchmarks/race.py`, by the prebuilt libraries of the package node-llama-cpp, which choose the code of
// this processor: npm install --prefix FOLDER node-llama-cpp, and `--llama FOLDER`.
// Messages are those of peers/worker.py: a line of JSON each, read from stdin, answered on stdout.
import {createRequire} from "node:module";
import {createInterface} from "node:readline";
import {pathToFileURL} from "node:url";

const {getLlama, InputLookupTokenPredictor, DraftSequenceTokenPredictor} = await import(
    pathToFileURL(createRequire(process.argv[2] + "/").resolve("node-llama-cpp")).href);
const say = (message) => process.stdout.write(JSON.stringify(message) + "\n");
let llama, model, contexts = {}, draftModel, threads, rows;

async function load(asked) {
    threads = asked.threads;
    rows = asked.rows;
    llama = await getLlama({gpu: false, build: "never", maxThreads: threads, logger: (_, text) => console.error(text)});
    model = await llama.loadModel({modelPath: asked.model});
    if (asked.draft) draftModel = await llama.loadModel({modelPath: asked.draft});
    const used = [...llama.systemInfo.matchAll(/(\w+) = 1/g)].map(([_, name]) => name);
    return {about: `llama.cpp ${llama.llamaCppRelease.release} with ${used.join(" ")}`};
}

// A context per number of rows, whose sequences are evaluated together; a row has `contextSize` slots of its own.
async function context(of, count, name) {
    contexts[name] ??= await of.createContext(
        {sequences: count, contextSize: 2048, threads: {ideal: threads, min: threads}, batchSize: 512});
    return contexts[name];
}

function predictor(way, prompt, drafts) {
    const [kind, gamma] = way.split("@");
    if (kind === "plain") return undefined;
    const most = Number(gamma);
    if (kind !== "lookup")
        return new DraftSequenceTokenPredictor(drafts.getSequence(), {minTokens: most, maxTokens: most, minConfidence: 0});
    const found = new InputLookupTokenPredictor({predictionLength: {max: most}});
    found.updateInputTokens(prompt);
    return found;
}

async function text(own, drafts, prompt, asked, number) {
    const guess = predictor(asked.way, prompt, drafts);
    const sequence = own.getSequence({tokenPredictor: guess});
    const found = [];
    const sampled = asked.temperature ? {topK: 0, topP: 1, minP: 0, seed: asked.seed + number} : {};
    try {
        for await (const token of sequence.evaluate(prompt, {temperature: asked.temperature, yieldEogToken: true, ...sampled})) {
            found.push(token);
            if (found.length === asked.count) break;
        }
    } finally {
        sequence.dispose();
        guess?.draftSequence?.dispose();
    }
    return found;
}

async function run(asked) {
    const count = asked.prompts.length, batch = asked.batch ?? 1;
    const own = await context(model, batch, `target ${batch}`);
    const drafts = asked.way.startsWith("draft") ? await context(draftModel, batch, `draft ${batch}`) : undefined;
    const tokens = [];
    for (let start = 0; start < count; start += batch)
        tokens.push(...await Promise.all(asked.prompts.slice(start, start + batch).map(
            (prompt, number) => text(own, drafts, prompt, asked, start + number))));
    return {tokens};
}

say({ready: true});
for await (const line of createInterface({input: process.stdin})) {
    const asked = JSON.parse(line);
    say(await (asked.do === "load" ? load(asked) : run(asked)));
}
process.exit(0);
