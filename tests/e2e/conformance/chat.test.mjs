// W29-W46: meaning of the chat route.
import test, { after, afterEach, before, describe } from 'node:test';
import { readFileSync } from 'node:fs';
import path from 'node:path';
import { assert, ask, chat, rawPost, root, startServer, stream, strictModel, thinkModel } from '../clients/server.mjs';

let server;
before(async () => { server = await startServer(); });
after(() => server?.stop());
afterEach(async () => assert.equal((await server.get('/livez')).status, 200));

const C = { messages: [{ role: 'user', content: 'hi' }], max_tokens: 4, temperature: 0 };
const norway = ask('What is the capital of Norway?');
const answer = 'The capital of Norway is Oslo.';
const post = async (pathname, body, s = server) => {
  const r = await rawPost(s, pathname, body);
  return { status: r.status, headers: r.headers, json: JSON.parse(r.body) };
};
const promptOf = async (body) => {
  const r = await post('/apply-template', body);
  assert.equal(r.status, 200, JSON.stringify(r.json));
  return r.json.prompt;
};
const refused = async (body, status, code, param) => {
  const r = await post('/v1/chat/completions', body);
  assert.equal(r.status, status, JSON.stringify(body).slice(0, 200) + JSON.stringify(r.json));
  assert.equal(r.json.error.code, code, r.json.error.message);
  if (param !== undefined) assert.equal(r.json.error.param, param);
  return r.json.error;
};
const story = ask('Tell me a story.', { temperature: 1 });
// What may differ between two equal requests.
const stable = (r) => ({ content: r.content, finish: r.json.choices.map((c) => c.finish_reason), logprobs: r.json.choices.map((c) => c.logprobs) });

test('W29 model', async () => {
  const id = (await (await server.get('/v1/models')).json()).data[0].id;
  for (const model of [undefined, '', 'default', id]) {
    const r = await chat(server, { ...C, model });
    assert.equal(r.status, 200);
    assert.equal(r.json.model, id);
  }
  const e = await refused({ ...C, model: 'x' }, 404, 'model_not_found', 'model');
  assert.ok(e.message.includes(id), e.message);
  assert.equal(e.type, 'invalid_request_error');
  const aliased = await startServer({ set: { 'model.alias': 'gpt-x, org/name:tag' } });
  try {
    for (const model of ['gpt-x', 'org/name:tag']) assert.equal((await chat(aliased, { ...C, model })).json.model, id);
    const unknown = await chat(aliased, { ...C, model: 'gpt-y' });
    assert.equal(unknown.status, 404);
    for (const name of [id, 'gpt-x', 'org/name:tag']) assert.ok(unknown.json.error.message.includes(name), unknown.json.error.message);
    const [m] = (await (await aliased.get('/v1/models')).json()).data;
    assert.deepEqual(m.aliases, ['gpt-x', 'org/name:tag']);
    for (const name of ['gpt-x', 'org/name:tag', 'org%2Fname:tag', 'org%2Fname%3Atag']) assert.deepEqual(await (await aliased.get(`/v1/models/${name}`)).json(), m);
  } finally {
    await aliased.stop();
  }
});

test('W30 messages', async () => {
  await refused({ ...C, messages: undefined }, 400, 'missing_field', 'messages');
  await refused({ ...C, messages: [] }, 400, 'invalid_value', 'messages');
  await refused({ ...C, messages: Array(4097).fill({ role: 'user', content: 'a' }) }, 400, 'invalid_value', 'messages');
  await refused({ ...C, messages: [{ role: 'bot', content: 'a' }] }, 400, 'invalid_value', 'messages[0].role');
  await refused({ ...C, messages: [{ role: 'user', content: null }] }, 400, 'missing_field', 'messages[0].content');
  await refused({ ...C, messages: [{ role: 'user' }] }, 400, 'missing_field', 'messages[0].content');
  const about = (m) => promptOf({ messages: [{ role: 'user', content: 'a' }, m, { role: 'user', content: 'b' }] });
  assert.equal((await chat(server, { ...C, messages: Array(4096).fill({ role: 'user', content: '' }) })).json.error.code, 'context_length_exceeded', '4,096 are counted, not refused');
  const empty = await about({ role: 'assistant', content: '' });
  assert.equal(await about({ role: 'assistant', content: [] }), empty);
  assert.equal(await about({ role: 'assistant', content: null }), empty);
  assert.equal(await about({ role: 'assistant' }), empty);
});

test('W31 parts', async () => {
  const one = (content) => promptOf({ messages: [{ role: 'user', content }] });
  assert.equal(await one([{ type: 'text', text: 'a' }, { type: 'text', text: 'b' }]), await one('a\nb'));
  assert.equal(await one([{ type: 'input_text', text: 'a' }]), await one('a'));
  assert.equal(await one([]), await one(''));
  await refused({ ...C, messages: [{ role: 'user', content: [{ type: 'image_url', image_url: { url: 'x' } }] }] }, 400, 'unsupported_content', 'messages[0].content[0].type');
});

test('W32 developer and system', async () => {
  const of = (role) => promptOf({ messages: [{ role, content: 'Answer briefly.' }, { role: 'user', content: 'a' }] });
  assert.equal(await of('developer'), await of('system'));
  assert.ok((await of('system')).includes('Answer briefly.'));
});

test('W32 a strict template: system in the middle is merged in front', async () => {
  const s = await startServer({ model: strictModel() });
  try {
    const apply = (messages) => rawPost(s, '/apply-template', { messages });
    const prompt = async (messages) => { const r = await apply(messages); assert.equal(r.status, 200, r.body.toString()); return JSON.parse(r.body.toString()).prompt; };
    const [sys, more, user, said, asks] = [['system', 'Be brief.'], ['system', 'In French.'], ['user', 'a'], ['assistant', 'b'], ['user', 'c']].map(([role, content]) => ({ role, content }));
    const dev = (m) => ({ ...m, role: 'developer' });
    const merged = { role: 'system', content: 'Be brief.\n\nIn French.' };
    const wanted = await prompt([merged, user, said, asks]);
    for (const messages of [[sys, user, said, more, asks], [sys, more, user, said, asks], [dev(sys), user, said, dev(more), asks], [user, sys, said, more, asks]])
      assert.equal(await prompt(messages), wanted, JSON.stringify(messages));
    assert.equal(await prompt([user, said, sys, asks]), await prompt([sys, user, said, asks]), 'the only one goes in front');
    // The answer comes from that prompt too; an order that merging does not mend is the client's fault, in the template's words.
    const r = await chat(s, { messages: [user, said, sys, asks], temperature: 0, max_tokens: 400 });
    assert.ok(r.content.includes('forty-two'), r.content);
    const wrong = await chat(s, { messages: [user, asks] });
    assert.equal(wrong.status, 400);
    assert.equal(wrong.json.error.code, 'unsupported_content');
    assert.match(wrong.json.error.message, /Roles must alternate/);
  } finally {
    await s.stop();
  }
});

test('W33 a final assistant message is continued', async () => {
  const messages = [...norway.messages, { role: 'assistant', content: 'The capital of' }];
  const r = await chat(server, { messages, temperature: 0 });
  assert.equal(r.content, ' Norway is Oslo.');
  assert.ok((await promptOf({ messages })).endsWith('The capital of'));
  const opened = await promptOf({ messages, continue_final_message: false });
  assert.ok(opened.endsWith('<|im_start|>assistant\n'));
  const two = await promptOf({ messages: [...norway.messages, { role: 'assistant', content: 'x' }, { role: 'assistant', content: 'The capital' }] });
  assert.ok(two.endsWith('The capital'));
  const s = await startServer({ model: strictModel() });
  try { // a template that wants the roles in turns refuses two
    const asked = [norway.messages[0], { role: 'assistant', content: 'x' }];
    assert.equal((await post('/apply-template', { messages: asked }, s)).status, 200);
    const r = await post('/v1/chat/completions', { messages: [...asked, { role: 'assistant', content: 'y' }] }, s);
    assert.deepEqual([r.status, r.json.error.code], [400, 'unsupported_content']);
  } finally {
    await s.stop();
  }
});

test('W34 max_tokens', async () => {
  const fresh = ask(`${'The harbour was quiet. '.repeat(20)}How do I make pancakes?`, { max_tokens: 0 });
  const zero = await chat(server, fresh);
  assert.equal(zero.content, '');
  assert.equal(zero.json.choices[0].finish_reason, 'length');
  assert.equal(zero.json.usage.completion_tokens, 0);
  const cached = (r) => r.json.usage.prompt_tokens_details.cached_tokens;
  const warm = await chat(server, { ...fresh, max_tokens: 1 });
  assert.ok(cached(warm) > 2 * cached(zero) && cached(warm) > 64, `${cached(zero)}, then ${cached(warm)} cached`);
  const none = await stream(server, { ...fresh, stream_options: { include_usage: true } });
  assert.deepEqual(none.list.map((e) => e.choices[0]?.delta), [{ role: 'assistant', content: '' }, {}, undefined]);
  assert.equal(none.finish, 'length');
  assert.equal((await chat(server, { ...norway, max_tokens: -1 })).content, answer);
  const both = await chat(server, { ...norway, max_tokens: 1, max_completion_tokens: 3, n_predict: 2 });
  assert.equal(both.json.usage.completion_tokens, 3);
  const cut = await chat(server, { ...norway, max_tokens: 100000, ignore_eos: true });
  assert.equal(cut.json.choices[0].finish_reason, 'length');
  assert.equal(cut.json.usage.islet.context_full, true);
  assert.equal(cut.json.usage.total_tokens, 2048);
  const short = await chat(server, { ...norway, max_tokens: 2 });
  assert.equal(short.json.usage.islet.context_full, false);
  assert.equal((await chat(server, { ...norway, max_tokens: 2 ** 53 - 1 })).content, answer, 'more than any context is cut too');
});

test('W35 the context', async () => {
  const ids = (n) => ({ prompt: Array(n).fill(273), temperature: 0, max_tokens: 5, ignore_eos: true });
  const r = await post('/v1/completions', ids(2048));
  assert.equal(r.status, 400);
  assert.equal(r.json.error.code, 'context_length_exceeded');
  assert.equal(r.json.error.n_ctx, 2048);
  assert.equal(r.json.error.n_prompt_tokens, 2048);
  assert.match(r.json.error.message, /maximum context length is 2048 tokens/);
  const more = await post('/v1/completions', { ...ids(2060), stream: true });
  assert.equal(more.status, 400);
  assert.match(more.json.error.message, /maximum context length is 2048 tokens.*2060 tokens/);
  assert.deepEqual([more.json.error.n_prompt_tokens, more.json.error.n_ctx, more.json.error.type], [2060, 2048, 'invalid_request_error']);
  const said = await post('/v1/chat/completions', ask('word '.repeat(3000)));
  assert.deepEqual([said.status, said.json.error.code, said.json.error.n_ctx], [400, 'context_length_exceeded', 2048]);
  assert.ok(said.json.error.message.includes(`${said.json.error.n_prompt_tokens} tokens`));
  const last = await post('/v1/completions', ids(2047));
  assert.equal(last.status, 200, JSON.stringify(last.json));
  assert.equal(last.json.usage.completion_tokens, 1);
  assert.equal(last.json.choices[0].finish_reason, 'length');
  assert.equal(last.json.usage.islet.context_full, true);
});

test('W36 seed', async () => {
  const at = (seed) => chat(server, { ...story, seed, max_tokens: 32, logprobs: true });
  const [a, b] = [await at(5), await at(5)];
  assert.deepEqual(stable(a), stable(b));
  assert.equal(a.headers['x-islet-seed'], '5');
  const free = await at(undefined);
  const again = await at(Number(free.headers['x-islet-seed']));
  assert.deepEqual(stable(free), stable(again));
  assert.equal(String(free.json.usage.islet.seed), free.headers['x-islet-seed']);
  const big = await rawPost(server, '/v1/chat/completions', JSON.stringify({ ...C }).replace('{', '{"seed":9223372036854775807,'));
  assert.equal(big.headers['x-islet-seed'], '9223372036854775807');
  const minus = [await at(-1), await at(-1)];
  assert.notEqual(minus[0].headers['x-islet-seed'], minus[1].headers['x-islet-seed']);
  await refused({ ...C, seed: -2 }, 400, 'invalid_value', 'seed');
  const over = await rawPost(server, '/v1/chat/completions', JSON.stringify(C).replace('{', '{"seed":9223372036854775808,'));
  assert.deepEqual([over.status, JSON.parse(over.body).error.code], [400, 'invalid_json']);
  assert.ok(Number(free.headers['x-islet-seed']) < 2 ** 53);
  const streamed = await stream(server, { ...story, seed: 5, max_tokens: 32 });
  assert.equal(streamed.headers['x-islet-seed'], '5');
  const told = await stream(server, { ...story, seed: 5, max_tokens: 2, stream_options: { include_usage: true } });
  assert.equal(told.usage.islet.seed, 5);
  assert.equal(streamed.content, a.content);
  const greedy = [await chat(server, { ...norway, seed: 1 }), await chat(server, { ...norway, seed: 2 })];
  assert.equal(greedy[0].content, greedy[1].content);
});

test('W37 n', async () => {
  const all = await chat(server, { ...story, seed: 100, n: 3, max_tokens: 20 });
  assert.deepEqual(all.json.choices.map((c) => c.index), [0, 1, 2]);
  let completion = 0;
  for (let i = 0; i < 3; i++) {
    const one = await chat(server, { ...story, seed: 100 + i, max_tokens: 20 });
    assert.equal(all.json.choices[i].message.content, one.content);
    completion += one.json.usage.completion_tokens;
  }
  assert.equal(all.json.usage.completion_tokens, completion);
  const s = await stream(server, { ...story, seed: 100, n: 3, max_tokens: 20 });
  const { assemble } = await import('../clients/server.mjs');
  for (let i = 0; i < 3; i++) {
    const of = s.list.flatMap((e) => e.choices).filter((c) => c.index === i);
    assert.deepEqual(of[0].delta, { role: 'assistant', content: '' });
    for (const c of of.slice(1, -1)) assert.ok(c.delta.content.length > 0 && c.finish_reason === null && Object.keys(c.delta).length === 1);
    assert.deepEqual([of.at(-1).delta, of.at(-1).finish_reason], [{}, all.json.choices[i].finish_reason]);
    const c = assemble(s.list, i);
    assert.equal(c.content, all.json.choices[i].message.content);
    assert.equal(c.roles, 1);
    assert.equal(c.finishes, 1);
  }
  await refused({ ...C, n: 9 }, 400, 'invalid_value', 'n');
  const one = await chat(server, { ...story, seed: 100, max_tokens: 1 });
  assert.equal(all.json.usage.prompt_tokens, one.json.usage.prompt_tokens, 'the prompt counts once');
  // Behind the largest seed comes 0.
  const wrapped = await rawPost(server, '/v1/chat/completions', JSON.stringify({ ...story, n: 2, max_tokens: 20 }).replace('{', '{"seed":9223372036854775807,'));
  assert.equal(JSON.parse(wrapped.body).choices[1].message.content, (await chat(server, { ...story, seed: 0, max_tokens: 20 })).content);
});

describe('W38 stop', () => {
  const cases = [
    ['string', 'Norway', 'The capital of ', 'Norway'], ['array', ['Oslo', 'capital'], 'The ', 'capital'], ['across tokens', ' of Nor', 'The capital', ' of Nor'],
    ['earliest wins', ['Oslo', 'of'], 'The capital ', 'of'], ['then the longest', ['cap', 'capital'], 'The ', 'capital'], ['partial at the end', 'Oslo.?', answer, null],
    ['empty ones are dropped', ['', 'Oslo'], 'The capital of Norway is ', 'Oslo'], ['at the first byte', 'T', '', 'T'],
    ['one that begins earlier and ends later', ['Nor', 'of Norway is'], 'The capital ', 'of Norway is'], ['one that begins earlier and does not come', ['of Norway was', 'Nor'], 'The capital of ', 'Nor'],
    ['inside another', ['capital of', 'pit'], 'The ', 'capital of'], ['longer than the text', `${answer} `, answer, null], ['the whole text', answer, '', answer],
    ['none', [], answer, null], ['only empty ones', ['', ''], answer, null],
  ];
  for (const [name, stop, expected, reason] of cases) {
    test(name, async () => {
      const r = await chat(server, { ...norway, stop });
      assert.equal(r.content, expected);
      assert.equal(r.json.choices[0].finish_reason, 'stop');
      assert.equal(r.json.choices[0].stop_reason, reason);
      const s = await stream(server, { ...norway, stop });
      assert.equal(s.content, expected);
      assert.equal(s.stopReason, reason);
    });
  }
  test('seventeen are not', () => refused({ ...norway, stop: Array(17).fill('a') }, 400, 'invalid_value', 'stop'));
  test('sixteen are fine', async () => assert.equal((await chat(server, { ...norway, stop: Array.from({ length: 16 }, (_, i) => `zz${i}`) })).content, answer));
  test('partial at a token limit is released', async () => {
    const r = await chat(server, { ...norway, max_tokens: 4, stop: ' Norway is Rome' });
    const plain = await chat(server, { ...norway, max_tokens: 4 });
    assert.equal(r.content, plain.content);
  });
});

test('W39 logit_bias', async () => {
  const oslo = (await post('/tokenize', { content: ' Oslo' })).json.tokens[0];
  const rome = (await post('/tokenize', { content: ' Paris' })).json.tokens[0];
  assert.ok(!(await chat(server, { ...norway, logit_bias: { [oslo]: -100 }, max_tokens: 12 })).content.includes('Oslo'));
  assert.ok(!(await chat(server, { ...norway, logit_bias: [[oslo, false]], max_tokens: 12 })).content.includes('Oslo'));
  assert.ok((await chat(server, { ...norway, logit_bias: { [rome]: 100 }, max_tokens: 3 })).content.includes('Paris'));
  const only = await chat(server, { ...norway, logit_bias: { [rome]: 100 }, max_tokens: 3, return_tokens: true });
  assert.deepEqual(only.json.choices[0].tokens, [rome, rome, rome], '100 forces');
  for (const bias of [{ 4096: 1 }, { abc: 1 }, { 5: 101 }, { 5: -101 }]) await refused({ ...C, logit_bias: bias }, 400, 'invalid_value', `logit_bias.${Object.keys(bias)[0]}`);
});

test('W40 logprobs', async () => {
  const body = { ...norway, logprobs: true, top_logprobs: 20 };
  const r = await chat(server, body);
  const { content } = r.json.choices[0].logprobs;
  assert.equal(Buffer.from(content.flatMap((t) => t.bytes)).toString(), r.content);
  for (const t of content) {
    assert.equal(t.top_logprobs.length, 20);
    const values = t.top_logprobs.map((x) => x.logprob);
    assert.deepEqual(values, [...values].sort((a, b) => b - a));
    assert.ok(values.reduce((sum, v) => sum + Math.exp(v), 0) <= 1 + 1e-4);
    assert.equal(t.logprob, values[0], 'greedy takes the first');
    assert.ok(t.logprob <= 0);
  }
  assert.equal(r.json.choices[0].logprobs.refusal, null);
  assert.deepEqual(Object.keys(content[0]), ['token', 'logprob', 'bytes', 'top_logprobs']);
  assert.deepEqual(Object.keys(content[0].top_logprobs[0]), ['token', 'logprob', 'bytes']);
  assert.equal(content.length, r.json.usage.completion_tokens - 1, 'the end token is left out');
  for (const t of content) assert.equal(t.token, Buffer.from(t.bytes).toString(), 'the piece');
  assert.equal((await chat(server, norway)).json.choices[0].logprobs, null);
  // Of the raw logits: neither temperature nor bias nor penalties change them; forbidden tokens are still there.
  const [first] = content;
  const dos = (await post('/tokenize', { content: 'The' })).json.tokens[0];
  const bent = await chat(server, { ...body, temperature: 2, seed: 3, top_k: 1, logit_bias: { [dos]: -5 }, max_tokens: 1 });
  assert.deepEqual(bent.json.choices[0].logprobs.content[0].top_logprobs, first.top_logprobs);
  // Behind a stop string nothing is told.
  const cut = await chat(server, { ...body, stop: ' Norway' });
  const said = Buffer.from(cut.json.choices[0].logprobs.content.flatMap((t) => t.bytes)).toString();
  assert.equal(said, cut.content);
  assert.deepEqual(cut.json.choices[0].logprobs.content, content.slice(0, cut.json.choices[0].logprobs.content.length));
  const none = await chat(server, { ...norway, logprobs: true });
  assert.deepEqual(none.json.choices[0].logprobs.content[0].top_logprobs, []);
  const s = await stream(server, body);
  assert.deepEqual(s.logprobs, content);
  await refused({ ...C, logprobs: true, top_logprobs: 21 }, 400, 'invalid_value', 'top_logprobs');
  for (const level of ['reference', 'avx2']) {
    let other;
    try {
      other = await startServer({ set: { 'compute.cpu_level': level, 'compute.threads': '1' }, allow: [/cpu_level/] });
    } catch (e) {
      if (/cpu_level|AVX/i.test(e.message)) continue; // this processor lacks the level
      throw e;
    }
    try {
      assert.deepEqual((await chat(other, body)).json.choices[0].logprobs.content, content, level);
    } finally {
      await other.stop();
    }
  }
});

test('W41 ignore_eos', async () => {
  const r = await chat(server, { ...norway, ignore_eos: true, max_tokens: 20 });
  assert.equal(r.json.usage.completion_tokens, 20);
  assert.equal(r.json.choices[0].finish_reason, 'length');
});

test('W42 settings that are greedy', async () => {
  const greedy = (await chat(server, { ...story, temperature: 0, max_tokens: 24 })).content;
  for (const extra of [{ top_k: 1 }, { min_p: 1 }, { top_p: 0 }]) assert.equal((await chat(server, { ...story, ...extra, seed: 3, max_tokens: 24 })).content, greedy, JSON.stringify(extra));
  const loop = ask('Hello!', { ignore_eos: true, max_tokens: 60 });
  const plain = (await chat(server, loop)).content;
  assert.notEqual((await chat(server, { ...loop, frequency_penalty: 2 })).content, plain);
  assert.notEqual((await chat(server, { ...loop, repeat_penalty: 2 })).content, plain);
  assert.notEqual((await chat(server, { ...loop, presence_penalty: 2 })).content, plain);
  assert.equal((await chat(server, { ...loop, repeat_penalty: 2, repeat_last_n: 0 })).content, plain, 'off');
  for (const off of [{ top_k: -1 }, { top_k: 0 }, { top_k: 2 ** 40 }, { min_p: 0 }, { top_p: 1 }])
    assert.equal((await chat(server, { ...story, ...off, seed: 3, max_tokens: 24 })).content, (await chat(server, { ...story, seed: 3, max_tokens: 24 })).content, JSON.stringify(off));
});

test('W43 thinking', async () => {
  const s = await startServer({ model: thinkModel() });
  const hi = ask('Hi');
  const reasoning = 'The user wants a number; I know one.', said = '\nIt is forty-two \u{1F600}!';
  try {
    const auto = await chat(s, hi);
    assert.equal(auto.json.choices[0].message.reasoning_content, reasoning);
    assert.equal(auto.content, said);
    const detail = auto.json.usage.completion_tokens_details.reasoning_tokens;
    assert.ok(detail >= 10 && detail < auto.json.usage.completion_tokens, `${detail} reasoning tokens`);
    const none = await chat(s, { ...hi, reasoning_format: 'none' });
    assert.equal(none.content, `<think>\n${reasoning}\n</think>\n${said}`);
    assert.equal(none.json.choices[0].message.reasoning_content, undefined);
    for (const off of [{ chat_template_kwargs: { enable_thinking: false } }, { reasoning_effort: 'none' }]) {
      const r = await chat(s, { ...hi, ...off });
      assert.equal(r.content, said.trimStart(), JSON.stringify(off));
      assert.equal(r.json.choices[0].message.reasoning_content, undefined);
    }
    const wins = await chat(s, { ...hi, reasoning_effort: 'none', chat_template_kwargs: { enable_thinking: true } });
    assert.equal(wins.json.choices[0].message.reasoning_content, reasoning);
    const wrong = await chat(s, { ...hi, chat_template_kwargs: { enable_thinking: 'false' } });
    assert.equal(wrong.status, 400);
    assert.deepEqual([wrong.json.error.code, wrong.json.error.param], ['invalid_type', 'chat_template_kwargs.enable_thinking']);
    const deepseek = await chat(s, { ...hi, reasoning_format: 'deepseek' });
    assert.equal(deepseek.json.choices[0].message.reasoning_content, reasoning);
    const streamed = await stream(s, hi);
    assert.equal(streamed.reasoning, reasoning);
    assert.equal(streamed.content, said);
    for (const e of streamed.list) for (const c of e.choices) assert.ok(!(c.delta.content && c.delta.reasoning_content), 'never both');
    const stopped = await chat(s, { ...hi, stop: 'number' });
    assert.equal(stopped.json.choices[0].message.reasoning_content, 'The user wants a ');
    assert.equal(stopped.content, '');
    assert.equal(stopped.json.choices[0].stop_reason, 'number');
  } finally {
    await s.stop();
  }
});

test('W44 cache_prompt changes no byte', async () => {
  const long = `${'The lighthouse stood on an island. '.repeat(12)}What colour is a lemon?`;
  const body = (extra) => ask(long, { max_tokens: 24, logprobs: true, ...extra });
  const cold = await chat(server, body({ cache_prompt: false }));
  const first = await chat(server, body());
  const warm = await chat(server, body());
  const off = await chat(server, body({ cache_prompt: false }));
  for (const r of [first, warm, off]) assert.deepEqual(stable(r), stable(cold));
  const cached = (r) => r.json.usage.prompt_tokens_details.cached_tokens;
  assert.equal(cached(cold), 0);
  assert.equal(cached(off), 0);
  assert.ok(cached(warm) > 0, `${cached(warm)} cached`);
  assert.ok(cached(warm) < warm.json.usage.prompt_tokens);
});

test('W45 usage', async () => {
  const before = await server.metrics();
  const r = await chat(server, { ...norway, cache_prompt: false });
  const u = r.json.usage;
  const { prompt } = (await post('/apply-template', norway)).json;
  const { tokens } = (await post('/tokenize', { content: prompt, add_special: false, parse_special: true })).json;
  assert.equal(u.prompt_tokens, tokens.length);
  assert.equal(u.total_tokens, u.prompt_tokens + u.completion_tokens);
  // A row for every prompt token and for every generated token but the last, in 4 layers with 4 experts each.
  const rows = u.prompt_tokens + u.completion_tokens - 1;
  assert.equal(u.islet.expert_hits.vram + u.islet.expert_hits.ram + u.islet.expert_misses, rows * 4 * 4);
  let after;
  await server.until('the counters', async () => {
    after = await server.metrics();
    return after.get('islet_worker_requests_done_total') > before.get('islet_worker_requests_done_total');
  });
  const grown = (name) => after.get(name) - before.get(name);
  assert.equal(grown('islet_worker_prompt_tokens_total'), u.prompt_tokens);
  assert.equal(grown('islet_worker_generated_tokens_total'), u.completion_tokens);
  assert.equal(grown('islet_worker_expert_hits_ram_total') + grown('islet_worker_expert_misses_total'), rows * 16);
});

test('W45 the sums of many requests are the worker counters', async () => {
  await server.idle();
  const names = ['prompt_tokens', 'generated_tokens', 'expert_hits_ram', 'expert_misses'].map((n) => `islet_worker_${n}_total`);
  const before = await server.metrics();
  const all = await Promise.all([1, 2, 3, 4, 5, 6].map((i) => chat(server, { ...story, seed: i, n: 1 + (i % 3), max_tokens: 4 * i, cache_prompt: i % 2 === 0 })));
  const sum = (of) => all.reduce((total, r) => total + of(r.json.usage), 0);
  let after;
  await server.until('the counters', async () => {
    after = await server.metrics();
    return after.get('islet_worker_requests_done_total') - before.get('islet_worker_requests_done_total') === all.reduce((n, r) => n + r.json.choices.length, 0);
  });
  const grown = names.map((n) => after.get(n) - before.get(n));
  assert.equal(grown[1], sum((u) => u.completion_tokens));
  assert.equal(grown[2], sum((u) => u.islet.expert_hits.ram));
  assert.equal(grown[3], sum((u) => u.islet.expert_misses));
});

test('the exact shape of an answer', async () => {
  const r = await post('/v1/chat/completions', norway);
  const keys = (o) => Object.keys(o).join(' ');
  assert.equal(keys(r.json), 'id object created model system_fingerprint choices usage timings');
  assert.match(r.json.id, /^chatcmpl-[A-Za-z0-9]{24}$/);
  assert.match(r.json.system_fingerprint, /^islet-\d+-[0-9a-f]{8}$/);
  const [c] = r.json.choices;
  assert.deepEqual(c, { index: 0, message: { role: 'assistant', content: answer, refusal: null }, logprobs: null, finish_reason: 'stop', stop_reason: null });
  assert.equal(keys(c), 'index message logprobs finish_reason stop_reason');
  const { usage } = r.json;
  assert.equal(keys(usage), 'prompt_tokens completion_tokens total_tokens prompt_tokens_details completion_tokens_details islet');
  assert.equal(keys(usage.prompt_tokens_details), 'cached_tokens');
  assert.equal(keys(usage.completion_tokens_details), 'reasoning_tokens');
  assert.equal(keys(usage.islet), 'seed expert_hits expert_misses ssd_bytes queue_ms resumed context_full');
  assert.equal(keys(usage.islet.expert_hits), 'vram ram');
  assert.equal(keys(r.json.timings), 'cache_n prompt_n prompt_ms prompt_per_second predicted_n predicted_ms predicted_per_second');
  const t = await post('/v1/completions', { prompt: 'The sun', temperature: 0, max_tokens: 2 });
  assert.equal(keys(t.json), 'id object created model system_fingerprint choices usage timings');
  assert.equal(keys(t.json.choices[0]), 'index text logprobs finish_reason stop_reason');
  assert.equal(t.json.system_fingerprint, r.json.system_fingerprint);
});

// 50 questions of the model's own test chats, three settings each.
const chats = JSON.parse(readFileSync(path.join(root, 'tests/models/robust_chat-q8_0.json'))).chats;
const questions = [...new Set(chats.flatMap((c) => c.turns.map((t) => t.user)))].slice(0, 50);
const settings = [{ temperature: 0 }, { temperature: 0.8, seed: 11, top_p: 0.9 }, { temperature: 1.2, seed: 12, top_k: 40, min_p: 0.02, frequency_penalty: 0.5 }];

async function pooled(items, width, fn) {
  const results = [];
  let next = 0;
  await Promise.all(Array.from({ length: width }, async () => {
    while (next < items.length) {
      const i = next++;
      results[i] = await fn(items[i], i);
    }
  }));
  return results;
}

test('W46 JSON equals the stream: batch 1, batch 8, and over a killed worker', async () => {
  assert.equal(questions.length, 50);
  const items = questions.flatMap((q) => settings.map((s) => ({ messages: [{ role: 'user', content: q }], max_tokens: 32, ...s })));
  const alone = await pooled(items, 1, async (b) => (await chat(server, b)).content);
  const together = await pooled(items, 8, async (b) => (await stream(server, b)).content);
  assert.deepEqual(together, alone);
  let killed = false;
  const over = await pooled(items.slice(0, 48), 8, async (b, i) => {
    if (i === 20 && !killed) {
      killed = true;
      server.worker.kill();
    }
    return i % 2 ? (await chat(server, b)).content : (await stream(server, b)).content;
  });
  assert.deepEqual(over, alone.slice(0, 48));
});
