// W64 and the rows that name LangChain.
import test, { after, before } from 'node:test';
import { ChatOpenAI } from '@langchain/openai';
import { HumanMessage, SystemMessage } from '@langchain/core/messages';
import { z } from 'zod';
import { assert, startServer, thinkModel } from './server.mjs';

let server, attempts;
const model = (s = server, extra = {}) => new ChatOpenAI({
  model: 'default', temperature: 0, apiKey: 'any', maxRetries: 2,
  configuration: { baseURL: s.v1, fetch: (...a) => { attempts++; return fetch(...a); } }, ...extra });
before(async () => { server = await startServer(); });
after(() => server?.stop());

const question = [new HumanMessage('What is the capital of Norway?')];
const answer = 'The capital of Norway is Oslo.';

test('W64 invoke', async () => {
  const r = await model().invoke([new SystemMessage('You are a helpful assistant.'), ...question]);
  assert.equal(typeof r.content, 'string');
  assert.ok(r.content.includes('Oslo'));
  assert.ok(r.usage_metadata.input_tokens > 0);
});

test('W64 stream, usage_metadata and cache_read', async () => {
  let all;
  for await (const chunk of await model().stream(question)) all = all ? all.concat(chunk) : chunk;
  assert.equal(all.content, answer);
  assert.ok(all.usage_metadata.output_tokens >= 6);
  const long = [new HumanMessage(`${'The lighthouse stood on an island. '.repeat(16)}What colour is a lemon?`)];
  const read = (r) => r.usage_metadata.input_token_details.cache_read;
  const cold = await model().invoke(long), warm = await model().invoke(long);
  assert.equal(warm.content, cold.content);
  assert.ok(read(warm) > read(cold) && read(warm) >= 64, `${read(cold)}, then ${read(warm)} cached`);
  assert.ok(read(warm) < warm.usage_metadata.input_tokens);
});

test('W64 abort', async () => {
  const controller = new AbortController();
  const long = model(server, { modelKwargs: { ignore_eos: true, max_tokens: 1500 } });
  await assert.rejects(async () => {
    for await (const chunk of await long.stream([new HumanMessage('Tell me a story.')], { signal: controller.signal })) {
      if (chunk.content) controller.abort();
    }
  });
  await server.idle(1000);
});

test('W64 an error is raised after one attempt', async () => {
  attempts = 0;
  await assert.rejects(model(server, { model: 'absent-model' }).invoke(question), /absent-model/);
  assert.equal(attempts, 1);
});

test('row 18: withStructuredOutput is refused, once', async () => {
  attempts = 0;
  const structured = model().withStructuredOutput(z.object({ capital: z.string() }), { method: 'jsonSchema' });
  await assert.rejects(structured.invoke('Give me facts about Chile as JSON.'), (e) => e.status === 400 || /400/.test(e.message));
  assert.equal(attempts, 1);
});

test('row 22: reasoning_content in additional_kwargs', async () => {
  const s = await startServer({ model: thinkModel() });
  try {
    let all;
    for await (const chunk of await model(s).stream([new HumanMessage('Hi')])) all = all ? all.concat(chunk) : chunk;
    assert.equal(all.additional_kwargs.reasoning_content, 'The user wants a number; I know one.');
  } finally {
    await s.stop();
  }
});
