// W22-W28: what is taken as JSON, and every field of a request.
import test, { after, afterEach, before, describe } from 'node:test';
import { assert, ask, chat, rawPost, startServer, stream, thinkModel, raw, httpBytes } from '../clients/server.mjs';

let server;
before(async () => { server = await startServer(); });
after(() => server?.stop());
afterEach(async () => assert.equal((await server.get('/livez')).status, 200));

const C = { messages: [{ role: 'user', content: 'hi' }], max_tokens: 1, temperature: 0 };
const Ctext = JSON.stringify(C);

async function refused(body, code, param, pathname = '/v1/chat/completions') {
  const r = await rawPost(server, pathname, body);
  const what = typeof body === 'string' ? body.slice(0, 120) : Buffer.isBuffer(body) ? body.toString('latin1').slice(0, 120) : JSON.stringify(body).slice(0, 200);
  assert.equal(r.status, 400, `${what} -> ${r.body.toString().slice(0, 300)}`);
  assert.ok(r.headers['x-request-id'], 'x-request-id');
  const { error } = JSON.parse(r.body);
  assert.equal(error.code, code, `${what} -> ${error.message}`);
  assert.equal(error.type, 'invalid_request_error');
  if (param !== undefined) assert.equal(error.param, param, what);
  return error;
}

async function accepted(extra, { pathname, base = C } = {}) {
  const r = await chat(server, { ...base, ...extra }, { path: pathname });
  assert.equal(r.status, 200, `${JSON.stringify(extra)} -> ${r.body.toString().slice(0, 300)}`);
  return r;
}

describe('W22 what is not one JSON object', () => {
  const deep = (n) => '{"a":'.repeat(n) + '1' + '}'.repeat(n);
  const bad = {
    empty: '', array: '[]', number: '1', open: '{', 'trailing comma': `${Ctext.slice(0, -1)},}`, 'something behind': '{} x',
    'duplicate key': `{"seed":1,"seed":2,${Ctext.slice(1)}`, 'depth 65': deep(65), NaN: `{"seed":NaN,${Ctext.slice(1)}`,
    'string': '"a"', 'null': 'null', 'cut string': '{"a":"b', 'unescaped control byte': '{"a":"\n"}', 'single quotes': "{'a':1}", 'depth 65 of arrays': `{"a":${'['.repeat(64)}${']'.repeat(64)}}`, 'nested duplicate': `{"metadata":{"a":1,"a":1},${Ctext.slice(1)}`, Infinity: `{"seed":Infinity,${Ctext.slice(1)}`, '-2^63-1': `{"seed":-9223372036854775809,${Ctext.slice(1)}`,
    '1e400': `{"temperature":1e400,${Ctext.slice(1)}`.replace(',"temperature":0', ''), '2^63': `{"seed":9223372036854775808,${Ctext.slice(1)}`,
  };
  for (const [name, body] of Object.entries(bad)) {
    test(name, async () => {
      for (const pathname of ['/v1/chat/completions', '/v1/completions', '/tokenize', '/detokenize', '/apply-template']) await refused(body, 'invalid_json', null, pathname);
    });
  }
  test('invalid UTF-8', () => refused(Buffer.concat([Buffer.from('{"model":"'), Buffer.from([0xc3, 0x28]), Buffer.from('"}')]), 'invalid_json'));
  test('depth 64 is fine', async () => accepted({ metadata: JSON.parse(deep(63)) }));
  test('a BOM and white space behind are fine', async () => {
    const r = await rawPost(server, '/v1/chat/completions', Buffer.concat([Buffer.from([0xef, 0xbb, 0xbf]), Buffer.from(`${Ctext}\r\n`)]));
    assert.equal(r.status, 200);
  });
});

test('W23 surrogates and U+0000', async () => {
  const prompt = async (content) => {
    const r = await rawPost(server, '/apply-template', `{"messages":[{"role":"user","content":"${content}"}]}`);
    assert.equal(r.status, 200, r.body.toString());
    return JSON.parse(r.body).prompt;
  };
  assert.ok((await prompt('a\\ud83d b')).includes('a� b'));
  assert.ok((await prompt('a\\ude00 b')).includes('a� b'));
  assert.ok((await prompt('\\ud83d\\ud83d\\ude00')).includes('�\u{1F600}'));
  assert.ok((await prompt('\\ud83d\\ude00')).includes('\u{1F600}'));
  assert.ok((await prompt('a\\u0000b')).includes('a\0b'));
  assert.equal((await rawPost(server, '/v1/chat/completions', Ctext.replace('"hi"', '"h\\u0000i"'))).status, 200);
  await refused(`{"model":"a\\u0000",${Ctext.slice(1)}`, 'invalid_value', 'model');
  await refused({ ...C, metadata: { a: ['b', 'c\0'] } }, 'invalid_value', 'metadata');
  await refused({ ...C, messages: [{ role: 'user\0', content: 'a' }] }, 'invalid_value', 'messages[0].role');
  await refused({ ...C, messages: [{ role: 'user', content: [{ type: 'text\0', text: 'a' }] }] }, 'invalid_value', 'messages[0].content[0].type');
  await refused({ ...C, messages: [{ role: 'user', content: 'a', name: 'b\0' }] }, 'invalid_value', 'messages[0].name');
  assert.equal((await chat(server, { prompt: 'a\0b', max_tokens: 1 }, { path: '/v1/completions' })).status, 200);
});

// Fields of a chat request: wrong types, values just outside, and both ends. `needs` are other fields that must
// stand beside it; min and max are accepted.
const fields = {
  model: { wrong: [1, true, []], bad: ['m'.repeat(257)], ok: ['default', ''] },
  messages: { wrong: ['hi', {}, 1], bad: [[]], ok: [] },
  max_completion_tokens: { wrong: ['5', true, 5.5, [], {}], bad: [-2, -1e300, 1e300], ok: [-1, 0, 5.0, 2 ** 33, Number.MAX_SAFE_INTEGER] },
  max_tokens: { wrong: ['5', true, 5.5], bad: [-2], ok: [-1, 0, 5.0, 2 ** 32, 2 ** 32 - 1] },
  n_predict: { wrong: ['5', true, 5.5], bad: [-2], ok: [-1, 0, 5.0, 2 ** 53 - 1] },
  temperature: { wrong: ['1', true, [], {}], bad: [-0.0001, 10.0001, 1e300], ok: [0, 10, 5e-324] },
  top_p: { wrong: ['1', true], bad: [-0.0001, 1.0001], ok: [0, 0.5, 1, 5e-324] },
  top_k: { wrong: ['1', 1.5, false], bad: [-2], ok: [-1, 0, 1, 40, 2 ** 31, 2 ** 53 - 1] },
  min_p: { wrong: ['1', true], bad: [-0.0001, 1.0001], ok: [0, 1] },
  presence_penalty: { wrong: ['1', true], bad: [-2.0001, 2.0001], ok: [-2, 0, 2] },
  frequency_penalty: { wrong: ['1', true], bad: [-2.0001, 2.0001], ok: [-2, 0, 2] },
  repeat_penalty: { wrong: ['1', true], bad: [0, -1, 10.0001], ok: [5e-324, 1e-50, 1e-30, 10] },
  repetition_penalty: { wrong: ['1'], bad: [0, 10.1], ok: [0.1, 10] },
  repeat_last_n: { wrong: ['1', 1.5], bad: [-2, 2049], ok: [-1, 0, 2048] },
  seed: { wrong: ['1', 1.5, true], bad: [-2, 1e300], ok: [-1, 0, 5.0, Number.MAX_SAFE_INTEGER] },
  n: { wrong: ['1', 1.5], bad: [0, 9], ok: [1, 8] },
  stop: { wrong: [1, {}, [1], true, [null]], bad: [Array(17).fill('x'), 'x'.repeat(257), ['x'.repeat(257)], 'a\0b'], ok: ['x', 'x'.repeat(256), Array(16).fill('x'), ['', 'x']], loose: true },
  stream: { wrong: ['true', 1], bad: [], ok: [false] },
  stream_options: { wrong: [1, []], bad: [], ok: [{ include_usage: true }, {}] },
  logprobs: { wrong: ['true', 5, 0], bad: [], ok: [true, false] },
  top_logprobs: { wrong: ['1', 1.5], bad: [-1, 21], ok: [0, 20], base: { logprobs: true } },
  logit_bias: {
    wrong: [1, 'x', { 5: 'x' }, { 5: true }, [5], [[5]], [[5, 1, 2]], [[5, '1']]],
    bad: [{ 5: 100.001 }, { 5: -100.001 }, { 4096: 1 }, { abc: 1 }, { '-1': 1 }, { '1.0': 1 }, { '': 1 }, [[4096, 1]], [[-1, 1]], [['a piece', 1]], Array(1025).fill([5, 1])],
    ok: [{}, { 5: 100, 6: -100, 4095: 0.5, 7: null }, [[7, false], [8, 1.5]], [], Array(1024).fill([5, 1])], loose: true },
  ignore_eos: { wrong: [1, 'true'], bad: [], ok: [true, false] },
  user: { wrong: [1, {}, true], bad: ['u'.repeat(513), 'a\0'], ok: ['u'.repeat(512)] },
  safety_identifier: { wrong: [1], bad: ['u'.repeat(513)], ok: ['u'.repeat(512)] },
  prompt_cache_key: { wrong: [1], bad: ['u'.repeat(513)], ok: ['u'.repeat(512)] },
  reasoning_effort: { wrong: [1, true], bad: ['much', '', 'None', 'low\0'], ok: ['none', 'minimal', 'low', 'medium', 'high', 'xhigh', 'max'] },
  chat_template_kwargs: {
    wrong: [1, 'x', [], { a: [] }, { a: {} }, { enable_thinking: 'false' }, { enable_thinking: 0 }], bad: [Object.fromEntries(Array.from({ length: 33 }, (_, i) => [`k${i}`, 1]))],
    ok: [{}, { enable_thinking: true, other: 'x', n: 1.5, none: null }, Object.fromEntries(Array.from({ length: 32 }, (_, i) => [`k${i}`, 1]))], loose: true },
  reasoning_format: { wrong: [1], bad: ['other'], ok: ['auto', 'none', 'deepseek'] },
  add_generation_prompt: { wrong: [1], bad: [], ok: [true, false] },
  continue_final_message: { wrong: [1], bad: [], ok: [true, false] },
  cache_prompt: { wrong: [1], bad: [], ok: [true, false] },
  priority: { wrong: ['1', 1.5], bad: [-101, 101], ok: [-100, 100] },
  sse_ping_interval: { wrong: ['1', 1.5], bad: [-2, 301], ok: [-1, 0, 300] },
  return_tokens: { wrong: [1], bad: [], ok: [true, false] },
  timings_per_token: { wrong: [1], bad: [], ok: [true, false] },
};

describe('W24 every field', () => {
  for (const [name, f] of Object.entries(fields)) {
    test(name, async () => {
      const base = { ...C, ...f.base };
      if (name !== 'messages') {
        const r = await accepted({ [name]: null }, { base: { ...base, [name]: undefined } });
        assert.equal(r.headers['x-islet-ignored'], undefined, `${name}: null is absent`);
      }
      const at = (error) => f.loose ? assert.ok(error.param?.startsWith(name), error.param) : assert.equal(error.param, name);
      for (const v of f.wrong) at(await refused({ ...base, [name]: v }, 'invalid_type'));
      for (const v of f.bad) at(await refused({ ...base, [name]: v }, 'invalid_value'));
      for (const v of f.ok) {
        const r = await accepted({ [name]: v }, { base });
        assert.equal(r.headers['x-islet-ignored'], undefined);
      }
    });
  }
  // The same on /v1/completions, but for what belongs to a chat.
  const chatOnly = ['messages', 'top_logprobs', 'logprobs', 'reasoning_effort', 'chat_template_kwargs', 'reasoning_format', 'add_generation_prompt', 'continue_final_message'];
  test('of a completion', async () => {
    const base = { prompt: 'hi', max_tokens: 1, temperature: 0 }, pathname = '/v1/completions';
    const both = Object.entries(fields).filter(([name]) => !chatOnly.includes(name));
    for (const [name, f] of [...both, ['logprobs', { wrong: ['1', true, 1.5], bad: [-1, 21], ok: [0, 20, 5.0] }], ['echo', { wrong: [1, 'true'], bad: [], ok: [true, false] }],
      ['prompt', { wrong: [1, {}, true, ['a', 1], [1, 'a'], [[1], 'a'], [1.5]], bad: [[], [4096], [-1], [[]], Array(9).fill('a')], ok: ['a', [5], ['a', 'b'], [[5], [6]], Array(8).fill('a')], loose: true }]]) {
      const starts = (error, v) => assert.ok(f.loose ? error.param?.startsWith(name) : error.param === name, `${name} ${JSON.stringify(v)?.slice(0, 60)}: ${error.param}`);
      for (const v of f.wrong) starts(await refused({ ...base, [name]: v }, 'invalid_type', undefined, pathname), v);
      for (const v of f.bad) starts(await refused({ ...base, [name]: v }, 'invalid_value', undefined, pathname), v);
      for (const v of [...f.ok, ...(name === 'prompt' ? [] : [null])]) assert.equal((await accepted({ [name]: v }, { base, pathname })).headers['x-islet-ignored'], undefined, name);
    }
    await refused({ ...base, prompt: undefined }, 'missing_field', 'prompt', pathname);
    await refused({ ...base, prompt: null }, 'missing_field', 'prompt', pathname);
    const r = await accepted({ reasoning_effort: 'low', messages: [] }, { base, pathname });
    assert.deepEqual(r.headers['x-islet-ignored'].split(',').sort(), ['messages', 'reasoning_effort']);
  });
  test('the first present of the three names of the length counts', async () => {
    for (const [body, n] of [[{ max_tokens: 2, n_predict: 3 }, 2], [{ n_predict: 3 }, 3], [{ max_completion_tokens: null, max_tokens: null, n_predict: 1 }, 1], [{ max_completion_tokens: 1, max_tokens: 2, n_predict: 3 }, 1]])
      assert.equal((await accepted({ max_tokens: undefined, ignore_eos: true, ...body })).json.usage.completion_tokens, n, JSON.stringify(body));
  });
  test('n and the places at the worker', async () => {
    const s = await startServer({ set: { 'batch.max_sequences': '2' } });
    try {
      assert.equal((await chat(s, { ...C, n: 2 })).status, 200);
      const r = await chat(s, { ...C, n: 3 });
      assert.equal(r.status, 400);
      assert.deepEqual([r.json.error.code, r.json.error.param], ['invalid_value', 'n']);
    } finally {
      await s.stop();
    }
  });
  test('messages', async () => {
    const one = (m, code, param) => refused({ ...C, messages: [{ role: 'user', content: 'a' }, m] }, code, `messages[1]${param}`);
    await one('x', 'invalid_type', '');
    await one({ content: 'a' }, 'missing_field', '.role');
    await one({ role: null, content: 'a' }, 'missing_field', '.role');
    await one({ role: 1, content: 'a' }, 'invalid_type', '.role');
    await one({ role: 'User', content: 'a' }, 'invalid_value', '.role');
    for (const role of ['system', 'developer', 'user']) await one({ role }, 'missing_field', '.content');
    await one({ role: 'user', content: 1 }, 'invalid_type', '.content');
    await one({ role: 'user', content: { type: 'text', text: 'a' } }, 'invalid_type', '.content');
    await one({ role: 'user', content: ['a'] }, 'invalid_type', '.content[0]');
    await one({ role: 'user', content: [{ text: 'a' }] }, 'missing_field', '.content[0].type');
    await one({ role: 'user', content: [{ type: 'text' }] }, 'missing_field', '.content[0].text');
    await one({ role: 'user', content: [{ type: 'text', text: 1 }] }, 'invalid_type', '.content[0].text');
    for (const type of ['image_url', 'input_audio', 'file', 'video_url', 'other']) await one({ role: 'user', content: [{ type: 'text', text: 'a' }, { type }] }, 'unsupported_content', '.content[1].type');
    await one({ role: 'user', content: 'a', name: 'n'.repeat(65) }, 'invalid_value', '.name');
    await one({ role: 'user', content: 'a', name: 1 }, 'invalid_type', '.name');
    await one({ role: 'tool', content: 'a' }, 'missing_field', '.tool_call_id');
    await one({ role: 'assistant', reasoning_content: 1 }, 'invalid_type', '.reasoning_content');
    await one({ role: 'assistant', tool_calls: {} }, 'invalid_type', '.tool_calls');
    assert.equal((await chat(server, { ...C, messages: [{ role: 'user', content: 'a', name: 'n'.repeat(64) }] })).status, 200);
    for (const type of ['text', 'input_text', 'output_text']) assert.equal((await chat(server, { ...C, messages: [{ role: 'user', content: [{ type, text: 'a' }] }] })).status, 200);
    assert.equal((await chat(server, { ...C, messages: [{ role: 'user', content: [{ type: 'refusal', refusal: 'a' }] }] })).status, 200);
  });
  test('no worker is lost to a body', async () => {
    for (const extra of [{ repeat_penalty: 5e-324, repeat_last_n: -1 }, { top_p: 5e-324, min_p: 5e-324, temperature: 5e-324 }, { ignore_eos: true, logit_bias: Array(1024).fill([5, -100]) },
      { priority: -100, prompt_cache_key: '\u00e9'.repeat(256), seed: 0, top_k: 2 ** 40, max_tokens: 2 ** 32 - 2 }]) await accepted({ temperature: 1, max_tokens: 2, ...extra });
    assert.equal((await server.metrics()).get('islet_gateway_worker_losses_total'), 0);
  });
  test('nested paths', async () => {
    await refused({ ...C, stream_options: { include_usage: 1 } }, 'invalid_type', 'stream_options.include_usage');
    await refused({ ...C, chat_template_kwargs: { enable_thinking: 'false' } }, 'invalid_type', 'chat_template_kwargs.enable_thinking');
    await refused({ ...C, messages: [{ role: 'user', content: [{ type: 1 }] }] }, 'invalid_type', 'messages[0].content[0].type');
    await refused({ ...C, top_logprobs: 1 }, 'invalid_value', 'top_logprobs');
  });
});

test('W25 whole numbers', async () => {
  for (const text of ['5.0', '5', '0.5e1', '50e-1']) {
    const r = await rawPost(server, '/v1/chat/completions', Ctext.replace('"max_tokens":1', `"ignore_eos":true,"max_tokens":${text}`));
    assert.equal(r.status, 200, text);
    assert.equal(JSON.parse(r.body).usage.completion_tokens, 5, text);
  }
  for (const text of ['5.5', '"5"', 'true', '[5]', '{}', '1e-1']) await refused(Ctext.replace('"max_tokens":1', `"max_tokens":${text}`), 'invalid_type', 'max_tokens');
});

test('W26 unknown fields are ignored and named', async () => {
  const r = await accepted({ store: true, metadata: {}, banana: 1, verbosity: 'low', 'a.b': 1 });
  const names = r.headers['x-islet-ignored'].split(',').map((s) => s.trim());
  assert.deepEqual(names.sort(), ['a.b', 'banana', 'metadata', 'store', 'verbosity'].sort());
  const named = 'store metadata service_tier prompt_cache_options prompt_cache_retention parallel_tool_calls verbosity moderation prediction id_slot n_keep n_discard n_cache_reuse samplers cache_salt keep_alive'.split(' ');
  const others = 'mirostat_tau mirostat_eta dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers xtc_threshold dynatemp_exponent adaptive_decay'.split(' ');
  for (const list of [named, others]) {
    const all = await accepted(Object.fromEntries(list.map((k) => [k, 1])));
    assert.deepEqual(all.headers['x-islet-ignored'].split(',').map((s) => s.trim()).sort(), [...list].sort());
    const s = await rawPost(server, '/v1/chat/completions', { ...C, stream: true, ...Object.fromEntries(list.map((k) => [k, null])) });
    assert.equal(s.headers['x-islet-ignored'], undefined, 'null is absent');
  }
  const long = await accepted({ ['x'.repeat(64)]: 1, ['y'.repeat(65)]: 1, 'a b': 1, 'a,b': 1, ä: 1 });
  assert.equal(long.headers['x-islet-ignored'], 'x'.repeat(64));
  const crlf = await accepted({ 'x\r\nSet-Cookie: a': 1, plain: 1 });
  assert.equal(crlf.headers['x-islet-ignored'], 'plain');
  assert.equal(crlf.headers['set-cookie'], undefined);
  const many = await accepted(Object.fromEntries(Array.from({ length: 30 }, (_, i) => [`f${i}`, 1])));
  assert.equal(many.headers['x-islet-ignored'].split(',').length, 16);
});

const schema = { type: 'json_schema', json_schema: { name: 'x', schema: {} } };
const tool = { type: 'function', function: { name: 'f', parameters: {} } };
const unsupported = {
  tools: [[[], null], [[tool]]], functions: [[[], null], [[{ name: 'f' }]]], tool_choice: [['auto', 'none'], ['required', { type: 'function', function: { name: 'f' } }]],
  function_call: [['auto', 'none'], [{ name: 'f' }]], response_format: [[{ type: 'text' }, { type: 'text', json_schema: null }], [{ type: 'json_object' }, schema, {}, { type: null }, { type: 'text', strict: true }]], grammar: [[''], ['root ::= "a"']],
  json_schema: [[null], [{}]], modalities: [[['text']], [['audio'], ['text', 'audio']]], audio: [[null], [{ voice: 'a' }]], web_search_options: [[null], [{}]],
  best_of: [[1], [2]], typical_p: [[1, 1.0], [0.5]], top_n_sigma: [[0, -1], [1]], mirostat: [[0], [1, 2]], dry_multiplier: [[0], [0.5]],
  xtc_probability: [[0], [0.5]], dynatemp_range: [[0], [0.5]], adaptive_target: [[-1], [0.5]], lora: [[[]], [[{ id: 0, scale: 1 }]]], min_keep: [[0, 1], [2]],
  n_probs: [[0], [1]], post_sampling_probs: [[false], [true]], echo: [[false], [true]], use_beam_search: [[false], [true]], min_tokens: [[0], [1]],
  stop_token_ids: [[[]], [[1]]], n_indent: [[0], [1]], t_max_predict_ms: [[0, -1], [5]],
};
describe('W27 what would change the answer and is not done', () => {
  for (const [name, [neutral, refusedValues]] of Object.entries(unsupported)) {
    test(name, async () => {
      for (const v of neutral) assert.equal((await accepted({ [name]: v })).headers['x-islet-ignored'], undefined);
      for (const v of refusedValues) await refused({ ...C, [name]: v }, 'unsupported_parameter', name);
      if (name === 'echo') return; // a field of completions
      const base = { prompt: 'hi', max_tokens: 1, temperature: 0 };
      for (const v of neutral) await accepted({ [name]: v }, { base, pathname: '/v1/completions' });
      for (const v of refusedValues) await refused({ ...base, [name]: v }, 'unsupported_parameter', name, '/v1/completions');
    });
  }
});

test('W28 every character arrives as it was said', async () => {
  const said = 'say "hi\\\x01\x7f\x85\u2028\u2029<tab>\t</x>end';
  const think = await startServer({ model: thinkModel() });
  try {
    const body = { prompt: '#', temperature: 0, max_tokens: 32 };
    for (const r of [await chat(think, body, { path: '/v1/completions' }), await stream(think, body, { path: '/v1/completions' })]) {
      assert.equal(r.content === undefined || r.content === '' ? r.text : r.content, said);
      const bytes = r.body;
      for (const banned of [[0xc2, 0x85], [0xe2, 0x80, 0xa8], [0xe2, 0x80, 0xa9]]) assert.equal(bytes.indexOf(Buffer.from(banned)), -1);
      assert.ok([...bytes].every((b) => (b >= 0x20 || b === 0x0a) && b !== 0x7f), 'no control byte');
    }
    const smile = await chat(think, ask('Hi'));
    assert.ok(smile.content.endsWith('forty-two \u{1F600}!'));
  } finally {
    await think.stop();
  }
});

test('route errors are JSON and keep the connection', async () => {
  const r = await raw(server, httpBytes('GET', '/x'));
  assert.equal(r.status, 404);
  assert.equal(JSON.parse(r.body).error.code, 'unknown_url');
  assert.ok(r.headers['x-request-id']);
});
