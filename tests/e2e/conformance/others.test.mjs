// W56-W61: the other routes.
import test, { after, afterEach, before, describe } from 'node:test';
import { assert, ask, assemble, chat, httpBytes, parseMetrics, raw, rawPost, sleep, slow, startServer, stream } from '../clients/server.mjs';

let server;
before(async () => { server = await startServer(); });
after(() => server?.stop());
afterEach(async () => assert.equal((await server.get('/livez')).status, 200));

const norway = ask('What is the capital of Norway?');
const post = async (pathname, body) => {
  const r = await rawPost(server, pathname, body);
  assert.ok(r.headers['x-request-id']);
  return { status: r.status, headers: r.headers, json: JSON.parse(r.body) };
};
const complete = (body) => post('/v1/completions', { temperature: 0, ...body });
const tokenize = async (content, extra = {}) => (await post('/tokenize', { content, ...extra })).json.tokens;

describe('W56 completions', () => {
  test('four forms of prompt', async () => {
    const a = 'The sun', b = 'The moon';
    const [ia, ib] = [await tokenize(a), await tokenize(b)];
    const one = await complete({ prompt: a });
    assert.equal(one.status, 200);
    assert.match(one.json.id, /^cmpl-/);
    assert.equal(one.json.object, 'text_completion');
    assert.match(one.json.id, /^cmpl-[A-Za-z0-9]{24}$/);
    const all = await complete({ prompt: a, ignore_eos: true });
    assert.deepEqual([all.json.usage.completion_tokens, all.json.choices[0].finish_reason], [16, 'length'], 'the default is 16');
    const full = await complete({ prompt: a, ignore_eos: true, max_tokens: -1 });
    assert.deepEqual([full.json.usage.total_tokens, full.json.usage.islet.context_full], [2048, true]);
    // This model's texts begin with no special token: ids are the text.
    assert.equal(one.json.usage.prompt_tokens, ia.length);
    assert.deepEqual(await tokenize(a, { add_special: true }), ia);
    assert.equal((await complete({ prompt: ia })).json.choices[0].text, one.json.choices[0].text);
    const two = await complete({ prompt: [a, b] });
    assert.deepEqual(two.json.choices.map((c) => c.index), [0, 1]);
    assert.equal(two.json.choices[0].text, one.json.choices[0].text);
    const ids = await complete({ prompt: [ia, ib] });
    assert.deepEqual(ids.json.choices.map((c) => c.text), two.json.choices.map((c) => c.text));
  });
  test('8 prompts x n 2: index = prompt * n + i', async () => {
    const prompt = Array.from({ length: 8 }, (_, i) => `Number ${i}`);
    const r = await complete({ prompt, n: 2, temperature: 1, seed: 40, max_tokens: 6 });
    assert.equal(r.status, 200, JSON.stringify(r.json));
    assert.deepEqual(r.json.choices.map((c) => c.index), Array.from({ length: 16 }, (_, i) => i));
    const single = await complete({ prompt: prompt[3], temperature: 1, seed: 41, max_tokens: 6 });
    assert.equal(r.json.choices[7].text, single.json.choices[0].text);
    for (const [i, k] of [[0, 0], [7, 1], [15, 1]]) {
      const one = await complete({ prompt: prompt[i >> 1], temperature: 1, seed: 40 + k, max_tokens: 6 });
      assert.equal(r.json.choices[i].text, one.json.choices[0].text, `choice ${i}`);
    }
    assert.equal((await complete({ prompt: [...prompt, 'x'] })).status, 400);
    const s = await stream(server, { prompt, n: 2, temperature: 1, seed: 40, max_tokens: 6 }, { path: '/v1/completions' });
    r.json.choices.forEach((c, i) => {
      const got = assemble(s.list, i);
      assert.deepEqual([got.text, got.finish, got.finishes], [c.text, c.finish_reason, 1], `choice ${i}`);
    });
  });
  test('echo, logprobs and offsets', async () => {
    const r = await complete({ prompt: 'The sun', echo: true, logprobs: 3, max_tokens: 5 });
    const c = r.json.choices[0];
    assert.ok(c.text.startsWith('The sun'));
    const { tokens, token_logprobs, top_logprobs, text_offset } = c.logprobs;
    assert.equal(tokens.join(''), c.text);
    assert.equal(token_logprobs[0], null, 'the first prompt token has none');
    assert.equal(tokens.length, token_logprobs.length);
    let offset = 0;
    tokens.forEach((t, i) => { assert.equal(text_offset[i], offset); offset += [...t].length; });
    assert.equal(Object.keys(c.logprobs).join(' '), 'tokens token_logprobs top_logprobs text_offset');
    assert.equal(top_logprobs[0], null);
    for (const t of top_logprobs.slice(1)) {
      const values = Object.values(t);
      assert.equal(values.length, 3);
      assert.deepEqual(values, [...values].sort((a, b) => b - a));
    }
    tokens.slice(-4).forEach((t, i) => assert.equal(token_logprobs.at(i - 4), top_logprobs.at(i - 4)[t], 'greedy takes the best'));
    const chosen = await complete({ prompt: 'The sun', logprobs: 0, max_tokens: 2 });
    assert.equal(chosen.json.choices[0].logprobs.token_logprobs.length, 2);
    assert.deepEqual(chosen.json.choices[0].logprobs.text_offset[0], 0);
    assert.equal((await complete({ prompt: 'The sun', max_tokens: 2 })).json.choices[0].logprobs, null);
    // Offsets are code points, of the prompt too; half characters do not count twice.
    const wide = (await complete({ prompt: 'a\u{1F680}\u00e9b', echo: true, logprobs: 1, max_tokens: 3 })).json.choices[0];
    const at = wide.logprobs.tokens.indexOf('b');
    assert.equal(wide.logprobs.text_offset[at], 3, JSON.stringify(wide.logprobs));
    // Scoring alone: no token is made.
    const score = await complete({ prompt: 'The sun', echo: true, logprobs: 0, max_tokens: 0 });
    assert.deepEqual([score.json.choices[0].text, score.json.choices[0].finish_reason, score.json.usage.completion_tokens], ['The sun', 'length', 0]);
    assert.deepEqual(score.json.choices[0].logprobs.token_logprobs, token_logprobs.slice(0, score.json.choices[0].logprobs.tokens.length));
    const bare = await complete({ prompt: 'The sun', echo: true, max_tokens: 5 });
    assert.equal(bare.json.choices[0].text, c.text);
  });
  test('suffix', async () => {
    const r = await complete({ prompt: 'a', suffix: 'b' });
    assert.deepEqual([r.status, r.json.error.code, r.json.error.param], [400, 'unsupported_parameter', 'suffix']);
    assert.equal((await complete({ prompt: 'a', suffix: null })).status, 200);
    assert.equal((await complete({ prompt: 'a', suffix: '' })).status, 200);
  });
  test('wrong prompts', async () => {
    for (const prompt of [undefined, 1, {}, [[1], 'x'], [4096], [-1], [1.5], []]) assert.equal((await complete({ prompt })).status, 400, JSON.stringify(prompt));
  });
  test('stream', async () => {
    const body = { prompt: 'The sun', temperature: 0, max_tokens: 12 };
    const json = await complete(body);
    const s = await stream(server, body, { path: '/v1/completions' });
    assert.equal(s.text, json.json.choices[0].text);
    assert.equal(s.roles, 0);
    assert.equal(s.finish, json.json.choices[0].finish_reason);
    assert.ok(s.list.every((e) => e.object === 'text_completion' && /^cmpl-/.test(e.id)));
    for (const e of s.list.slice(0, -1)) {
      assert.equal(Object.keys(e.choices[0]).join(' '), 'index text logprobs finish_reason');
      assert.ok(e.choices[0].text.length > 0 && e.choices[0].finish_reason === null);
    }
    const last = s.list.at(-1).choices[0];
    assert.deepEqual([last.text, Object.keys(last).join(' ')], ['', 'index text logprobs finish_reason stop_reason']);
    const echoed = await stream(server, { ...body, echo: true, logprobs: 2, stream_options: { include_usage: true } }, { path: '/v1/completions' });
    assert.equal(echoed.text, `The sun${json.json.choices[0].text}`);
    const whole = await complete({ ...body, echo: true, logprobs: 2 });
    for (const k of ['tokens', 'token_logprobs', 'top_logprobs', 'text_offset'])
      assert.deepEqual(echoed.list.flatMap((e) => e.choices[0]?.logprobs?.[k] ?? []), whole.json.choices[0].logprobs[k], k);
    assert.deepEqual(echoed.list.at(-1).choices, []);
    assert.ok(echoed.list.slice(0, -1).every((e) => e.usage === null));
  });
});

test('W57 tokenize and detokenize', async () => {
  assert.deepEqual(await tokenize(''), []);
  assert.deepEqual(await tokenize('<|im_end|>'), [4095]);
  assert.ok((await tokenize('<|im_end|>', { parse_special: false })).length > 1);
  const pieces = await tokenize('\u{1F680}a', { with_pieces: true });
  assert.ok(pieces.some((p) => Array.isArray(p.piece)), 'half characters are bytes');
  assert.equal(pieces.at(-1).piece, 'a');
  for (const tokens of [[4096], [-1], [1.5], ['a']]) assert.equal((await post('/detokenize', { tokens })).status, 400, JSON.stringify(tokens));
  for (const [path, body, code, param] of [['/tokenize', {}, 'missing_field', 'content'], ['/tokenize', { content: 1 }, 'invalid_type', 'content'], ['/tokenize', { content: null }, 'missing_field', 'content'],
    ['/tokenize', { content: 'a', add_special: 1 }, 'invalid_type', 'add_special'], ['/tokenize', { content: 'a', parse_special: 'x' }, 'invalid_type', 'parse_special'], ['/tokenize', { content: 'a', with_pieces: 0 }, 'invalid_type', 'with_pieces'],
    ['/detokenize', {}, 'missing_field', 'tokens'], ['/detokenize', { tokens: 'a' }, 'invalid_type', 'tokens'], ['/detokenize', { tokens: [1, 4096] }, 'invalid_value', 'tokens[1]'], ['/detokenize', { tokens: [1.5] }, 'invalid_type', 'tokens[0]'],
    ['/apply-template', {}, 'missing_field', 'messages'], ['/apply-template', { messages: [{ role: 'user' }] }, 'missing_field', 'messages[0].content']]) {
    const r = await post(path, body);
    assert.deepEqual([r.status, r.json.error.code, r.json.error.param], [400, code, param], `${path} ${JSON.stringify(body)}`);
  }
  assert.deepEqual((await post('/detokenize', { tokens: [] })).json, { content: '' });
  assert.deepEqual(await tokenize('ab', { add_special: null, parse_special: null, with_pieces: null }), await tokenize('ab'));
  assert.deepEqual((await tokenize('ab', { with_pieces: true })).map((p) => p.id), await tokenize('ab'));
  assert.deepEqual((await post('/detokenize', { tokens: [4095] })).json, { content: '<|im_end|>' });
  const half = (await tokenize('\u{1F680}'))[0];
  assert.equal((await post('/detokenize', { tokens: [half] })).json.content, '�');
  // 1 MiB of text that is as mixed as UTF-8 can be, from a fixed generator.
  let state = 12345;
  const random = (n) => { state = (Math.imul(state, 1103515245) + 12345) >>> 0; return (state >>> 8) % n; };
  let text = '';
  while (text.length < 700000) {
    const kind = random(8);
    const code = kind < 4 ? 32 + random(95) : kind < 5 ? 10 : kind < 6 ? 0xa1 + random(0x500) : kind < 7 ? 0x4e00 + random(0x5000) : 0x1f300 + random(0x300);
    text += String.fromCodePoint(code);
  }
  assert.ok(Buffer.byteLength(text) >= 1 << 20);
  const tokens = await tokenize(text, { parse_special: false });
  const back = await post('/detokenize', { tokens });
  assert.ok(back.json.content === text, 'round trip');
});

test('W58 apply-template and completions with ids are chat', async () => {
  const { prompt } = (await post('/apply-template', norway)).json;
  const ids = await tokenize(prompt, { add_special: false, parse_special: true });
  const c = await chat(server, { ...norway, logprobs: true, top_logprobs: 5, return_tokens: true });
  const r = await complete({ prompt: ids, max_tokens: -1, logprobs: 5, return_tokens: true });
  assert.equal(r.json.choices[0].text, c.content);
  assert.deepEqual(r.json.choices[0].logprobs.token_logprobs, c.json.choices[0].logprobs.content.map((t) => t.logprob));
  assert.deepEqual(r.json.choices[0].tokens, c.json.choices[0].tokens);
  assert.equal(r.json.usage.prompt_tokens, c.json.usage.prompt_tokens);
  r.json.choices[0].logprobs.top_logprobs.forEach((t, i) =>
    assert.deepEqual(Object.values(t), c.json.choices[0].logprobs.content[i].top_logprobs.map((x) => x.logprob)));
});

test('W59 models', async () => {
  const list = await (await server.get('/v1/models')).json();
  assert.equal(list.object, 'list');
  const [m] = list.data;
  assert.equal(m.object, 'model');
  assert.equal(m.owned_by, 'islet');
  for (const n of [m.context_length, m.max_model_len, m.meta.n_ctx]) assert.equal(n, 2048);
  assert.equal(m.meta.n_ctx_train, 2048);
  assert.equal(m.meta.n_vocab, 4096);
  assert.equal(m.meta.n_embd, 256);
  assert.equal(m.meta.n_expert, 16);
  assert.equal(m.meta.n_expert_used, 4);
  assert.equal(m.meta.n_params, 15485696);
  assert.ok(m.meta.size > 15e6 && m.meta.size < 17e6);
  assert.equal(Object.keys(list).join(' '), 'object data');
  assert.equal(Object.keys(m).join(' '), 'id object created owned_by context_length max_model_len meta aliases');
  assert.equal(Object.keys(m.meta).join(' '), 'n_ctx n_ctx_train n_vocab n_embd n_params size n_expert n_expert_used');
  assert.ok(Number.isInteger(m.created) && m.created > 0);
  assert.deepEqual(m.aliases, []);
  assert.deepEqual(await (await server.get(`/v1/models/${m.id}`)).json(), m);
  assert.deepEqual(await (await server.get('/models')).json(), list);
  const absent = await server.get('/v1/models/absent');
  assert.equal(absent.status, 404);
  assert.equal((await absent.json()).error.code, 'model_not_found');
  const loading = await startServer({ startWorker: false, ready: false });
  try {
    const r = await loading.get('/v1/models');
    assert.equal(r.status, 200);
    assert.equal((await r.json()).data[0].id, m.id);
    assert.equal((await loading.get('/readyz')).status, 503);
  } finally {
    await loading.stop();
  }
});

test('W60 health while the worker is stopped, loading and dead', async () => {
  const s = await startServer({ startWorker: false, ready: false, restart: false });
  const readyPaths = ['/readyz', '/health', '/v1/health'];
  const look = async (what, readyStatus) => {
    for (const [pathname, status] of [['/livez', 200], ['/readyz', readyStatus], ['/health', readyStatus], ['/v1/health', readyStatus], ['/status', 200], ['/metrics', 200]]) {
      let r, ms = Infinity;
      for (let i = 0; i < 3 && ms > 200; i++) { // the test's own machine may be busy
        const start = performance.now();
        r = await raw(s, httpBytes('GET', pathname));
        ms = performance.now() - start;
      }
      if (status !== null) assert.equal(r.status, status, `${what} ${pathname} ${r.body}`);
      assert.ok(ms < 200 * slow, `${what} ${pathname} took ${ms} ms`);
      if (pathname === '/metrics') {
        assert.equal(r.headers['content-type'], 'text/plain; version=0.0.4');
        assert.ok([...parseMetrics(r.body.toString()).keys()].every((k) => k.startsWith('islet_')));
      }
      if (pathname === '/status') assert.ok(JSON.parse(r.body).version >= 1);
      if (pathname === '/livez') assert.deepEqual(JSON.parse(r.body), { status: 'ok' });
      if (readyPaths.includes(pathname) && r.status === 200) assert.deepEqual(JSON.parse(r.body), { status: 'ok' });
      if (readyPaths.includes(pathname) && r.status === 503) {
        const json = JSON.parse(r.body);
        assert.deepEqual(Object.keys(json), ['error', 'status']);
        assert.match(json.status, /^(loading|worker_down)$/, what);
        assert.equal(json.error.code, 'worker_unavailable');
        assert.match(r.headers['retry-after'], /^([1-9]|[12][0-9]|30)$/);
      }
    }
  };
  try {
    await look('no worker', 503);
    s.worker.start();
    await look('loading', null);
    await s.waitReady();
    await look('serving', 200);
    s.worker.kill('SIGSTOP');
    await look('stopped', null);
    s.worker.kill('SIGCONT');
    s.worker.kill('SIGKILL');
    await s.until('the loss is seen', async () => (await s.get('/readyz')).status === 503);
    await look('dead', 503);
  } finally {
    await s.stop();
  }
});

test('W61 x-request-id', async () => {
  const good = 'trace-1.2:3_x';
  const echoed = await chat(server, { ...norway, max_tokens: 1 }, { headers: { 'x-request-id': good } });
  assert.equal(echoed.headers['x-request-id'], good);
  const logged = (id) => [server.gateway, server.worker].every((p) => p.lines.some((l) => l.includes(id)));
  await server.until('the id is in both logs', () => logged(good), 10000);
  assert.ok(server.worker.lines.some((l) => / request done trace=trace-1\.2:3_x client="islet-gateway" finish=length prompt=\d+ cached=\d+ generated=1 /.test(l)),
    server.worker.lines.join('\n'));
  // One that fails in the worker and each part of one request carry it too.
  const parts = await chat(server, { ...norway, n: 3, max_tokens: 1 }, { headers: { 'x-request-id': 'three-parts' } });
  assert.equal(parts.status, 200);
  await server.until('three lines', () => server.worker.lines.filter((l) => l.includes('trace=three-parts')).length === 3, 10000);
  const longest = 'x'.repeat(128);
  assert.equal((await chat(server, { ...norway, max_tokens: 1 }, { headers: { 'x-request-id': longest } })).headers['x-request-id'], longest);
  const lines = server.gateway.lines.filter((l) => l.includes(good));
  assert.ok(lines.some((l) => l.includes('answered')) && lines.some((l) => l.includes('done')), lines.join('\n'));
  for (const bad of ['x'.repeat(129), 'a b', 'ä', '', 'a,b', 'a/b']) {
    const r = await chat(server, { ...norway, max_tokens: 1 }, { headers: { 'x-request-id': bad } });
    const made = r.headers['x-request-id'];
    assert.match(made, /^req_[0-9a-f]{24}$/, bad);
    await server.until('the id that was made is in both logs', () => logged(made), 10000);
  }
});

test('an answer can be asked for again by its request id', async () => {
  const r = await chat(server, { ...norway });
  const again = await raw(server, httpBytes('GET', `/v1/requests/${r.headers['x-request-id']}`));
  assert.equal(again.status, 200, again.body.toString());
  assert.equal(JSON.parse(again.body).choices[0].message.content, r.content);
  // A stream that was cut comes again from its first byte.
  const story = ask('Tell me a story.', { max_tokens: 400, ignore_eos: true });
  const whole = await stream(server, story);
  let id;
  await rawPost(server, '/v1/chat/completions', { ...story, stream: true }, {
    headers: { 'x-request-id': 'cut-1' },
    onData: (d, c) => { if (d.includes('"content":"')) c.destroy(); } });
  id = 'cut-1';
  await sleep(50);
  const rest = await raw(server, httpBytes('GET', `/v1/requests/${id}`));
  assert.equal(rest.status, 200, rest.body.toString());
  const { events, assemble } = await import('../clients/server.mjs');
  assert.equal(assemble(events(rest.body).list).content, whole.content);
  assert.equal((await server.get('/v1/requests/absent')).status, 404);
  // Of one id the latest request counts, and only with the key that asked.
  const keyed = (max, key) => chat(server, { ...norway, max_tokens: max }, { headers: { 'x-request-id': 'same', ...(key && { authorization: `Bearer ${key}` }) } });
  const look = (key) => raw(server, httpBytes('GET', '/v1/requests/same', undefined, key ? { 'x-api-key': key } : {}));
  await keyed(1, 'k1');
  const two = await keyed(2, 'k1');
  assert.equal((await look()).status, 404);
  assert.equal((await look('k2')).status, 404);
  assert.equal(JSON.parse((await look('k1')).body).choices[0].message.content, two.content);
});
