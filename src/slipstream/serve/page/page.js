// The page's script: sends what was typed, shows tokens by where they came from, and draws what the draft did.

const at = (id) => document.getElementById(id);
const history = []; // the messages of the conversation
let last = null; // the latest request that was answered: {body, path, seconds, tokens}
let running = null; // the AbortController of the answer that is being written
let properties = { chat: false };

const TEXT = "The Eiffel Tower is a wrought-iron lattice tower on the Champ de Mars in Paris, France. It is named after the engineer Gustave Eiffel, whose company designed and built the tower from 1887 to 1889.";
const EXAMPLES = {
  chat: ["What is photosynthesis?", `Where is the tower, and who is it named after? ${TEXT}`, "Write a short poem about the sea."],
  text: ["def is_palindrome(text):\n", "class Stack:\n    def __init__(self):\n", "import re\n\n\ndef find_dates(text):\n"],
};
const NOISE = 0.1; // a smaller difference of two speeds says nothing

async function ask(path, body, { signal } = {}) {
  const headers = { "Content-Type": "application/json" };
  if (at("key").value) headers.Authorization = `Bearer ${at("key").value}`;
  const response = await fetch(path, { method: body ? "POST" : "GET", headers, signal, body: body && JSON.stringify(body) });
  if (response.ok) return response;
  const found = await response.json().catch(() => null);
  throw new Error(found?.error?.message ?? `The server answered ${response.status}.`);
}

// The objects of a stream of server-sent events, as they come.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
      if (data === "[DONE]") return;
      const found = JSON.parse(data);
      if (found.error) throw new Error(found.error.message);
      yield found;
    }
  }
}

function number(id) {
  const value = at(id).value;
  return value === "" ? undefined : Number(value);
}

function request() {
  const gamma = number("gamma");
  const common = {
    temperature: number("temperature") ?? 0,
    max_tokens: number("max-tokens") ?? 128,
    seed: number("seed") ?? 0,
    stream: true,
    stream_options: { include_usage: true },
    speculative: { explain: true, detailed: true, ...(gamma === undefined ? {} : { gamma }) },
  };
  if (properties.chat) return { path: "v1/chat/completions", body: { messages: [...history], ...common } };
  return { path: "v1/completions", body: { prompt: history.at(-1).content, ...common } };
}

function bubble(role, name) {
  const item = document.createElement("li");
  item.className = role;
  item.dataset.name = name;
  at("messages").append(item);
  item.scrollIntoView({ block: "nearest" });
  return item;
}

function show(item, token) {
  if (token.refused?.length) {
    const refused = document.createElement("del");
    refused.textContent = token.refused.join("");
    refused.title = "refused by the target";
    item.append(refused);
  }
  const span = document.createElement("span");
  span.className = token.source;
  span.title = token.source;
  span.textContent = token.text;
  item.append(span);
}

// Count what the tokens so far say: a round is the guesses that were kept, and a token of the target.
function counter() {
  const began = performance.now(), [drafted, accepted] = [[], []];
  let first = null, tokens = 0, kept = 0;
  return (token) => {
    first ??= performance.now();
    tokens += 1;
    if (token.source === "draft") return void (kept += 1);
    accepted.push(kept);
    drafted.push(kept + (token.refused?.length ?? 0));
    kept = 0;
    const [all, good] = [drafted, accepted].map((counts) => counts.reduce((sum, count) => sum + count, 0));
    const seconds = (performance.now() - first) / 1000;
    figures({
      metrics: {
        tokens_per_second: seconds > 0.2 ? (tokens - 1) / seconds : null,
        time_to_first_token_ms: first - began,
        speculative_decoding: {
          mean_acceptance_length: tokens / accepted.length,
          draft_acceptance_rate: all ? good / all : null,
          per_step_drafted: drafted,
          per_step_accepted: accepted,
        },
      },
    });
  };
}

// Read one answer -> what it was, with the metrics of its last chunk; the figures follow its tokens.
async function answer({ path, body }, item, signal) {
  const began = performance.now();
  const count = counter();
  const found = { text: "", tokens: 0, metrics: null };
  for await (const chunk of events(await ask(path, body, { signal }))) {
    if (chunk.metrics) found.metrics = chunk.metrics;
    if (chunk.usage) found.tokens = chunk.usage.completion_tokens;
    for (const choice of chunk.choices ?? []) {
      found.text += choice.delta?.content ?? choice.text ?? "";
      for (const token of choice.explained ?? []) {
        show(item, token);
        count(token);
      }
    }
  }
  found.seconds = (performance.now() - began) / 1000;
  return found;
}

async function busy(work) {
  running = new AbortController();
  at("error").textContent = "";
  for (const id of ["send", "again", "clear"]) at(id).disabled = true;
  at("stop").disabled = false;
  try {
    await work(running.signal);
  } catch (error) {
    if (error.name !== "AbortError") at("error").textContent = error.message;
  } finally {
    running = null;
    for (const id of ["send", "clear"]) at(id).disabled = false;
    at("stop").disabled = true;
    at("again").disabled = !last;
    refresh();
  }
}

async function send() {
  const text = at("text").value;
  if (!text.trim()) return;
  if (!properties.chat) history.length = 0;
  history.push({ role: "user", content: text });
  bubble("user", "you").append(text);
  examples();
  at("text").value = "";
  const asked = request();
  await busy(async (signal) => {
    const item = bubble("assistant", properties.target ?? "model");
    const found = await answer(asked, item, signal);
    history.push({ role: "assistant", content: found.text });
    last = { ...asked, found };
    at("factor").textContent = "press “Rerun plainly”";
    figures(found);
  });
}

// The same request without a draft: the speed-up for this very prompt.
async function again() {
  const body = { ...last.body, speculative: { gamma: 0, explain: true, detailed: true } };
  await busy(async (signal) => {
    const item = bubble("assistant", `${properties.target ?? "model"}, plainly`);
    const found = await answer({ path: last.path, body }, item, signal);
    const [fast, plain] = [last.found, found].map((one) => one.metrics?.tokens_per_second);
    const same = found.text === last.found.text ? "the same text" : "another text, as sampling may give";
    const factor = Math.abs(fast / plain - 1) < NOISE ? "as fast" : `${(fast / plain).toFixed(2)}×`;
    const told = fast && plain && last.found.tokens >= 32;
    const drafted = last.found.metrics?.speculative_decoding?.num_draft_tokens;
    figures(last.found);
    at("factor").textContent = `${!drafted ? "nothing was drafted" : told ? factor : "too short to tell"} (${same})`;
  });
}

function figures({ metrics }) {
  const decoding = metrics?.speculative_decoding;
  const text = (value, digits, unit = "") => (value == null ? "–" : `${value.toFixed(digits)}${unit}`);
  at("per-call").textContent = text(decoding?.mean_acceptance_length ?? 1, 2);
  at("rate").textContent = decoding?.draft_acceptance_rate == null ? "–" : text(100 * decoding.draft_acceptance_rate, 0, " %");
  at("speed").textContent = text(metrics?.tokens_per_second, 0);
  at("first").textContent = text(metrics?.time_to_first_token_ms, 0, " ms");
  const rounds = (decoding?.per_step_drafted ?? []).map((drafted, i) => {
    const item = document.createElement("li");
    const kept = decoding.per_step_accepted[i];
    item.className = !drafted ? "target" : kept === drafted ? "bonus" : kept ? "draft" : "correction";
    item.textContent = kept + 1;
    item.title = `${kept} of ${drafted} guesses kept`;
    return item;
  });
  at("rounds").replaceChildren(...rounds);
}

function svg(name, attributes, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

// Bars of acceptance by position, of all that was served; the recommended draft length is a dashed line.
function chart(shares, recommended) {
  const [left, bottom, height] = [16, 138, 120];
  const width = (320 - 2 * left) / Math.max(shares.length, recommended ?? 0, 1);
  const nodes = [at("chart-title"), svg("line", { class: "axis", x1: left, x2: 320 - left, y1: bottom, y2: bottom })];
  shares.forEach((share, i) => {
    const x = left + i * width;
    nodes.push(svg("rect", { x: x + 2, y: bottom - share * height, width: Math.max(1, width - 4), height: share * height }));
    nodes.push(svg("text", { x: x + width / 2, y: bottom - share * height - 3 }, Math.round(100 * share)));
    nodes.push(svg("text", { x: x + width / 2, y: bottom + 14 }, i + 1));
  });
  if (recommended != null) {
    const x = left + recommended * width;
    nodes.push(svg("line", { class: "mark", x1: x, x2: x, y1: bottom - height, y2: bottom }));
  }
  at("chart").replaceChildren(...nodes);
  if (!shares.length) return;
  const advice = recommended == null ? "" : recommended ? ` Draft length that pays most here: ${recommended} (dashed).` : " Drafting does not pay here.";
  at("chart-text").textContent = `Share of guesses kept (%), by place in the draft, of all requests.${advice}`;
}

// Buttons that ask an example, while nothing was asked.
function examples() {
  const shown = at("messages").childElementCount ? [] : EXAMPLES[properties.chat ? "chat" : "text"];
  if (at("examples").childElementCount === shown.length) return;
  at("examples").replaceChildren(...shown.map((text) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = text.length > 60 ? `${text.slice(0, 60)}…` : text.trim();
    button.addEventListener("click", () => {
      at("text").value = text;
      if (!running) send();
    });
    return button;
  }));
}

async function refresh() {
  try {
    properties = await (await ask("props")).json();
  } catch (error) {
    at("models").textContent = error.message;
    return;
  }
  at("models").textContent = `${properties.target}${properties.draft ? ` with the draft ${properties.draft}` : ", plainly"}, rule ${properties.rule}`;
  at("load").textContent = `${properties.running} running, ${properties.waiting} waiting`;
  chart(properties.acceptance_by_position, properties.recommended_gamma);
  examples();
}

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!running) send();
});
at("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    at("ask").requestSubmit();
  }
});
at("stop").addEventListener("click", () => running?.abort());
at("again").addEventListener("click", () => last && again());
at("clear").addEventListener("click", () => {
  history.length = 0;
  last = null;
  at("messages").replaceChildren();
  examples();
  at("again").disabled = true;
  at("text").focus();
});
at("key").addEventListener("change", refresh);
document.addEventListener("keydown", (event) => event.key === "Escape" && running?.abort());

refresh();
setInterval(refresh, 2000);
