// W56-W61: the other routes.
import test, { after, before, describe } from 'node:test';
import { assert, ask, chat, httpBytes, parseMetrics, raw, rawPost, sleep, slow, startServer, stream } from '../clients/server.mjs';

let server;
before(async () => { server = await startServer(); });
after(() => server?.stop());

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
    assert.ok(one.json.usage.completion_tokens <= 16, 'the default is 16');
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
    assert.equal((await complete({ prompt: [...prompt, 'x'] })).status, 400);
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
    assert.equal(Object.keys(top_logprobs.at(-1)).length, 3);
    const chosen = await complete({ prompt: 'The sun', logprobs: 0, max_tokens: 2 });
    assert.equal(chosen.json.choices[0].logprobs.token_logprobs.length, 2);
  });
  test('suffix', async () => {
    assert.equal((await complete({ prompt: 'a', suffix: 'b' })).status, 400);
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
    assert.ok(s.list.every((e) => e.object === 'text_completion'));
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
  const half = (await tokenize('\u{1F680}'))[0];
  assert.equal((await post('/detokenize', { tokens: [half] })).json.content, '�');
  // 1 MiB of text that is as mixed as UTF-8 can be, from a fixed generator.
  let state = 12345;
  const random = (n) => { state = (Math.imul(state, 1103515245) + 12345) >>> 0; return (state >>> 8) % n; };
  let text = '';
  while (text.length < 600000) {
    const kind = random(8);
    const code = kind < 4 ? 32 + random(95) : kind < 5 ? 10 : kind < 6 ? 0xa1 + random(0x500) : kind < 7 ? 0x4e00 + random(0x5000) : 0x1f300 + random(0x300);
    text += String.fromCodePoint(code);
  }
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
  const look = async (what, readyStatus) => {
    for (const [pathname, status] of [['/livez', 200], ['/readyz', readyStatus], ['/health', readyStatus], ['/v1/health', readyStatus], ['/status', 200], ['/metrics', 200]]) {
      const start = performance.now();
      const r = await raw(s, httpBytes('GET', pathname));
      const ms = performance.now() - start;
      if (status !== null) assert.equal(r.status, status, `${what} ${pathname} ${r.body}`);
      assert.ok(ms < 400 * slow, `${what} ${pathname} took ${ms} ms`);
      if (pathname === '/metrics') {
        assert.equal(r.headers['content-type'], 'text/plain; version=0.0.4');
        assert.ok([...parseMetrics(r.body.toString()).keys()].every((k) => k.startsWith('islet_')));
      }
      if (pathname === '/status') assert.ok(JSON.parse(r.body).version >= 1);
      if (pathname === '/readyz' && r.status === 503) assert.match(JSON.parse(r.body).status, /^(loading|worker_down)$/, what);
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
  await server.until('the id is in the log', () => server.gateway.lines.some((l) => l.includes(good)), 2000);
  for (const bad of ['x'.repeat(129), 'a b', 'ä']) {
    const r = await chat(server, { ...norway, max_tokens: 1 }, { headers: { 'x-request-id': bad } });
    assert.match(r.headers['x-request-id'], /^req_[0-9a-f]{24}$/, bad);
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
});
