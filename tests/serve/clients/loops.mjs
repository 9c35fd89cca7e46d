// JavaScript clients of the server: node loops.mjs PACKAGES URL CLIENT prints what the client got, as JSON.
// PACKAGES is a folder with node_modules; exit code 3 says that they have not this client.
import { createRequire } from 'node:module';

const [folder, url, name] = process.argv.slice(2);
const require = createRequire(`${folder}/package.json`);
const load = (library) => {
  try {
    return require(library);
  } catch {
    process.exit(3);
  }
};
const versionOf = (library) => require(`${folder}/node_modules/${library}/package.json`).version;

const prompt = 'What are 3 and 4?';
const properties = { a: { type: 'integer' }, b: { type: 'integer' } };
const parameters = { type: 'object', properties, required: ['a', 'b'], additionalProperties: false };

function openai() {
  const { OpenAI } = load('openai');
  const { zodResponseFormat } = load('openai/helpers/zod');
  const z = load('zod');
  const client = new OpenAI({ baseURL: url, apiKey: 'none', maxRetries: 0 });
  const asked = { model: 'tiny', messages: [{ role: 'user', content: prompt }] };
  const run = ({ a, b }) => String(a + b);
  const tools = [{ type: 'function', function: { name: 'add', function: run, parse: JSON.parse, parameters } }];
  const form = z.object({ color: z.enum(['red', 'blue']), count: z.number().int().min(0).max(9) });
  return {
    library: 'openai',
    text: async () => (await client.chat.completions.create(asked)).choices[0].message.content,
    stream: async () => {
      let text = '';
      for await (const chunk of await client.chat.completions.create({ ...asked, stream: true })) {
        text += chunk.choices[0].delta.content ?? '';
      }
      return text;
    },
    structured: async () => {
      const format = { response_format: zodResponseFormat(form, 'thing') };
      return (await client.chat.completions.parse({ ...asked, ...format })).choices[0].message.parsed;
    },
    tools: () => client.chat.completions.runTools({ ...asked, tools }).finalContent(),
    streamed_tools: () => client.chat.completions.runTools({ ...asked, tools, stream: true }).finalContent(),
  };
}

function vercel(library, make) {
  const { generateText, streamText, generateObject, tool, stepCountIs } = load('ai');
  const z = load('zod');
  const inputSchema = z.object({ a: z.number().int(), b: z.number().int() });
  const add = tool({ description: 'Add two numbers.', inputSchema, execute: async ({ a, b }) => a + b });
  const schema = z.object({ color: z.enum(['red', 'blue']), count: z.number().int().min(0).max(9) });
  const asked = { model: make(load(library)), prompt, maxRetries: 0 };
  const loop = { ...asked, tools: { add }, stopWhen: stepCountIs(3) };
  return {
    library,
    text: async () => (await generateText(asked)).text,
    stream: () => streamText(asked).text,
    structured: async () => (await generateObject({ ...asked, schema })).object,
    tools: async () => {
      const { text, response } = await generateText(loop);
      const messages = [{ role: 'user', content: prompt }, ...response.messages, { role: 'user', content: 'Again.' }];
      await generateText({ ...loop, prompt: undefined, messages });
      return text;
    },
    streamed_tools: () => streamText(loop).text,
  };
}

const settings = { baseURL: url, apiKey: 'none' };
const named = { ...settings, name: 'slipstream', supportsStructuredOutputs: true };
const clients = {
  'openai for JavaScript': openai,
  'ai, @ai-sdk/openai': () => vercel('@ai-sdk/openai', (library) => library.createOpenAI(settings)('tiny')),
  'ai, @ai-sdk/openai, chat': () => vercel('@ai-sdk/openai', (library) => library.createOpenAI(settings).chat('tiny')),
  'ai, @ai-sdk/openai-compatible': () =>
    vercel('@ai-sdk/openai-compatible', (library) => library.createOpenAICompatible(named)('tiny')),
};

const { library, ...features } = clients[name]();
const got = { version: versionOf(library) };
for (const [feature, run] of Object.entries(features)) {
  got[feature] = await run();
}
console.log(JSON.stringify(got));
