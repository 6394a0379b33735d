// Answers that hold the logprobs of a long prompt are put together beside the loop: the same bytes as short ones, other
// clients go on meanwhile, and a client may leave at any moment.
import test, { after, afterEach, before } from 'node:test';
import { assert, assemble, events, httpBytes, raw, rawPost, startServer } from '../clients/server.mjs';

let server;
before(async () => { server = await startServer(); });
after(() => server?.stop());
afterEach(async () => assert.equal((await server.get('/livez')).status, 200));

const N = 2000;
const ids = (k, n = N) => Array.from({ length: n }, (_, i) => 300 + ((i * 37 + k * 101) % 3000));
const ask = (extra) => ({ prompt: ids(0), echo: true, max_tokens: 4, temperature: 0, ignore_eos: true, cache_prompt: false, ...extra });
const path = '/v1/completions';
const post = async (body, headers) => {
  const r = await rawPost(server, path, body, { headers });
  assert.equal(r.status, 200, r.body.toString().slice(0, 300));
  return JSON.parse(r.body);
};
const columns = (r) => Object.fromEntries(['tokens', 'token_logprobs', 'text_offset'].map((k) => [k, r.choices[0].logprobs[k]]));

test('many logprobs and few are the same text, offsets and figures', async () => {
  const few = await post(ask({ logprobs: 0 })), many = await post(ask({ logprobs: 20 }));
  assert.equal(many.choices[0].text, few.choices[0].text);
  assert.deepEqual(columns(many), columns(few));
  const { token_logprobs, top_logprobs } = many.choices[0].logprobs;
  assert.equal(token_logprobs.length, N + 4);
  assert.ok(token_logprobs.slice(1).every((v) => v <= 0));
  assert.ok(top_logprobs.slice(1).every((t) => Object.keys(t).length >= 1 && Object.keys(t).length <= 20));
  assert.deepEqual(many.usage.completion_tokens, 4);
});

test('the stream holds what the whole answer holds, and so does a second look', async () => {
  const body = ask({ logprobs: 20, return_tokens: true });
  const json = await post(body, { 'x-request-id': 'echo-json' });
  const r = await rawPost(server, path, { ...body, stream: true }, { headers: { 'x-request-id': 'echo-stream' } });
  const check = (list) => {
    const s = assemble(list);
    assert.equal(s.text, json.choices[0].text);
    assert.deepEqual(s.tokens, json.choices[0].tokens);
    assert.equal(s.finishes, 1);
    for (const k of ['tokens', 'token_logprobs', 'top_logprobs', 'text_offset'])
      assert.deepEqual(list.flatMap((e) => e.choices[0].logprobs?.[k] ?? []), json.choices[0].logprobs[k], k);
  };
  check(events(r.body).list);
  const second = async (id) => (await raw(server, httpBytes('GET', `/v1/requests/${id}`))).body;
  check(events(await second('echo-stream')).list);
  assert.deepEqual(JSON.parse(await second('echo-json')).choices, json.choices);
});

test('eight prompts in one answer are eight answers; others are served while it is made', async () => {
  const prompt = Array.from({ length: 8 }, (_, k) => ids(k));
  const r = await post(ask({ prompt, logprobs: 20, max_tokens: 1 }), { 'x-request-id': 'echo-eight' });
  assert.deepEqual(r.choices.map((c) => c.index), [0, 1, 2, 3, 4, 5, 6, 7]);
  for (const k of [0, 7]) assert.deepEqual((await post(ask({ prompt: prompt[k], logprobs: 20, max_tokens: 1 }))).choices[0].logprobs, r.choices[k].logprobs);
  // A second look needs no worker: until its first byte comes, it is put together.
  let began = false, looks = 0;
  const again = raw(server, httpBytes('GET', '/v1/requests/echo-eight'), { onData: () => { began = true; } });
  for (; !began; looks++) await raw(server, httpBytes('GET', '/livez'));
  assert.deepEqual(JSON.parse((await again).body).choices, r.choices);
  assert.ok(looks > 8, `${looks} others were served meanwhile`);
});

test('a client that leaves while its answer is made', async () => {
  const gone = async (stream) => rawPost(server, path, ask({ prompt: Array(8).fill(ids(1)), logprobs: 20, max_tokens: 1, stream, cache_prompt: true }), {
    onData: (d, c) => c.destroy() });
  await Promise.all([gone(true), gone(true), gone(false)]);
  // And before its first byte, at many points of the work.
  for (let ms = 0; ms < 400; ms += 40) {
    await new Promise((resolve) => {
      const c = server.connect();
      c.on('error', () => {}).on('close', resolve);
      c.write(httpBytes('POST', path, ask({ prompt: ids(1), logprobs: 20, max_tokens: 0, cache_prompt: true })));
      setTimeout(() => c.destroy(), ms);
    });
  }
  await server.idle();
});
