// W63 and the rows that name the AI SDK.
import test, { after, before, describe } from 'node:test';
import { generateText, streamText, generateObject, APICallError } from 'ai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { createOpenAI } from '@ai-sdk/openai';
import { z } from 'zod';
import { assert, startServer, thinkModel } from './server.mjs';

let server, attempts, provider;
const made = (s, extra = {}) => createOpenAICompatible({
  name: 'islet', baseURL: s.v1, apiKey: 'any', includeUsage: true,
  fetch: (...a) => { attempts++; return fetch(...a); }, ...extra });
before(async () => {
  server = await startServer();
  provider = made(server);
});
after(() => server?.stop());

const prompt = 'What is the capital of Norway?';
const answer = 'The capital of Norway is Oslo.';

describe('W63 AI SDK', () => {
  test('generateText', async () => {
    const r = await generateText({ model: provider('default'), prompt, temperature: 0 });
    assert.equal(r.text, answer);
    assert.equal(r.finishReason, 'stop');
    assert.ok(r.usage.inputTokens > 0 && r.usage.outputTokens > 0);
  });

  test('streamText with usage', async () => {
    const r = streamText({ model: provider('default'), prompt, temperature: 0 });
    let text = '';
    for await (const t of r.textStream) text += t;
    assert.equal(text, answer);
    assert.equal(await r.finishReason, 'stop');
    const usage = await r.usage;
    assert.equal(usage.totalTokens, usage.inputTokens + usage.outputTokens);
    assert.ok(usage.outputTokens >= 6);
  });

  test('abortSignal ends the work', async () => {
    const controller = new AbortController();
    const r = streamText({ model: provider('default'), prompt: 'Tell me a story.', temperature: 0, abortSignal: controller.signal,
      providerOptions: { islet: { ignore_eos: true, max_tokens: 1500 } } });
    for await (const part of r.fullStream) {
      if (part.type === 'text-delta') controller.abort();
    }
    await server.idle(1000);
  });

  test('createOpenAI().chat()', async () => {
    const openai = createOpenAI({ baseURL: server.v1, apiKey: 'any' });
    const r = await generateText({ model: openai.chat('default'), prompt, temperature: 0 });
    assert.equal(r.text, answer);
    const s = streamText({ model: openai.chat('default'), prompt, temperature: 0 });
    let text = '';
    for await (const t of s.textStream) text += t;
    assert.equal(text, answer);
  });

  test('an error is one attempt with the message', async () => {
    attempts = 0;
    await assert.rejects(generateText({ model: provider('absent-model'), prompt }), (e) => {
      assert.ok(APICallError.isInstance(e));
      assert.equal(e.statusCode, 404);
      assert.match(e.message, /absent-model/);
      return true;
    });
    assert.equal(attempts, 1);
  });
});

describe('W67 rows of the AI SDK', () => {
  test('row 7: length is length', async () => {
    const r = await generateText({ model: provider('default'), prompt, temperature: 0, maxOutputTokens: 3 });
    assert.equal(r.finishReason, 'length');
    assert.equal(r.usage.outputTokens, 3);
  });

  test('row 10: two text parts are one text', async () => {
    const parts = await generateText({ model: provider('default'), temperature: 0, messages: [{ role: 'user', content: [{ type: 'text', text: 'What is the capital' }, { type: 'text', text: 'of Norway?' }] }] });
    const joined = await generateText({ model: provider('default'), temperature: 0, messages: [{ role: 'user', content: 'What is the capital\nof Norway?' }] });
    assert.equal(parts.text, joined.text);
    assert.equal(parts.usage.inputTokens, joined.usage.inputTokens);
  });

  test('row 18: a format that is not enforced is refused, once', async () => {
    for (const supportsStructuredOutputs of [true, false]) {
      attempts = 0;
      const p = made(server, { supportsStructuredOutputs });
      await assert.rejects(generateObject({ model: p('default'), prompt: 'Give me facts about Chile as JSON.', schema: z.object({ capital: z.string() }) }), (e) => {
        assert.ok(APICallError.isInstance(e));
        assert.equal(e.statusCode, 400);
        return true;
      });
      assert.equal(attempts, 1);
    }
  });

  test('row 2: an in-stream error is a part of the stream', async () => {
    const s = await startServer({ restart: false, set: { 'worker.resume_deadline': '1 s' }, allow: [/./] });
    try {
      const r = streamText({ model: made(s)('default'), prompt: 'Tell me a story.', temperature: 0, onError() {},
        providerOptions: { islet: { ignore_eos: true, max_tokens: 1900 } } });
      const errors = [];
      for await (const part of r.fullStream) {
        if (part.type === 'text-delta' && s.worker.alive) s.worker.kill();
        if (part.type === 'error') errors.push(part.error);
      }
      assert.equal(errors.length, 1);
    } finally {
      await s.stop();
    }
  });

  test('row 22: thoughts are reasoning parts', async () => {
    const s = await startServer({ model: thinkModel() });
    try {
      const r = streamText({ model: made(s)('default'), prompt: 'Hi', temperature: 0 });
      let reasoning = '', text = '';
      for await (const part of r.fullStream) {
        if (part.type === 'reasoning-delta') reasoning += part.text;
        if (part.type === 'text-delta') text += part.text;
      }
      assert.equal(reasoning, 'The user wants a number; I know one.');
      assert.match(text, /^\n?It is forty-two \u{1F600}!$/u);
    } finally {
      await s.stop();
    }
  });
});
