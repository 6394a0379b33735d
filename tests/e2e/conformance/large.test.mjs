// Bodies that are worked on beside the loop: the same answers as short ones, other clients go on meanwhile, the memory
// goes back, and a client may leave at any moment.
import test, { after, afterEach, before } from 'node:test';
import { readFileSync } from 'node:fs';
import { createConnection } from 'node:net';
import { assert, httpBytes, slow, startServer } from '../clients/server.mjs';

let server;
before(async () => { server = await startServer(); });
after(() => server?.stop());
afterEach(async () => assert.equal((await server.get('/livez')).status, 200));

const MiB = 1024 * 1024;
const text = (bytes) => 'the quick brown fox '.repeat(Math.ceil(bytes / 20)).slice(0, bytes);
const post = async (pathname, body) => {
  const r = await server.post(pathname, body);
  return { status: r.status, json: await r.json() };
};
const residentMiB = () =>
  Number(/VmRSS:\s+(\d+)/.exec(readFileSync(`/proc/${server.gateway.pid}/status`, 'utf8'))[1]) / 1024;

const bodies = {
  'a text of 15 MiB': ['/v1/chat/completions', () => JSON.stringify({ messages: [{ role: 'user', content: text(15 * MiB) }] }), 400, 'context_length_exceeded'],
  'too many messages': ['/v1/chat/completions', () => `{"messages":[${'{"role":"user","content":"x"},'.repeat(300000)}{}]}`, 400, 'invalid_value'],
  'a million ids': ['/v1/completions', () => `{"prompt":[${'1,'.repeat(1000000)}1]}`, 400, 'context_length_exceeded'],
  'JSON that breaks at its end': ['/v1/chat/completions', () => `{"messages":[${'{"a":1},'.repeat(300000)}}`, 400, 'invalid_json'],
  'a field nobody knows': ['/v1/completions', () => `{"prompt":"x","max_tokens":1,"temperature":0,"zzz":[${'"abc",'.repeat(500000)}1]}`, 200],
  'many objects': ['/v1/completions', () => `{"prompt":"x","zzz":[${'{},'.repeat(1100000)}1]}`, 400, 'invalid_json'],
  'another model': ['/v1/chat/completions', () => JSON.stringify({ model: 'other', messages: [{ role: 'user', content: text(MiB) }] }), 404, 'model_not_found'],
};

for (const [name, [pathname, make, status, code]] of Object.entries(bodies)) {
  test(`${name}: ${status}`, async () => {
    const r = await post(pathname, make());
    assert.equal(r.status, status, JSON.stringify(r.json).slice(0, 300));
    if (code) assert.equal(r.json.error.code, code);
  });
}

test('/tokenize, /detokenize and /apply-template give what short bodies give', async () => {
  const unit = 'The sun rose over the hills. ';
  const one = (await post('/tokenize', { content: unit.repeat(2) })).json.tokens;
  const n = 5000, many = (await post('/tokenize', { content: unit.repeat(2 * n) })).json.tokens;
  const half = (await post('/tokenize', { content: unit })).json.tokens;
  assert.equal(many.length, half.length + (one.length - half.length) * (2 * n - 1));
  const back = await post('/detokenize', { tokens: many });
  assert.equal(back.json.content, unit.repeat(2 * n));
  const pieces = await post('/tokenize', { content: unit.repeat(2 * n), with_pieces: true });
  assert.deepEqual(pieces.json.tokens.map((t) => t.id), many);
  const bad = await post('/detokenize', { tokens: [...many, -1] });
  assert.equal(bad.json.error.param, `tokens[${many.length}]`);
  const marked = (content) => post('/apply-template', { messages: [{ role: 'user', content }] });
  const short = (await marked('@@')).json.prompt, long = (await marked(text(8 * MiB))).json.prompt;
  assert.equal(long, short.replace('@@', text(8 * MiB)));
});

test('answers of many MiB stay in order and whole on one connection', async () => {
  const content = text(2 * MiB);
  const requests = [content, 'abc', content].map((c) => httpBytes('POST', '/tokenize', { content: c }));
  const expected = [];
  for (const c of [content, 'abc']) expected.push((await post('/tokenize', { content: c })).json);
  const all = await new Promise((resolve, reject) => {
    const c = createConnection(server.port, '127.0.0.1');
    const got = [];
    let have = '', at = 0;
    c.setEncoding('latin1').on('error', reject).on('data', (d) => {
      have += d;
      for (;;) {
        const head = have.indexOf('\r\n\r\n');
        if (head < 0) return;
        const n = Number(/content-length: (\d+)/i.exec(have.slice(0, head))[1]);
        if (have.length < head + 4 + n) return;
        got.push(JSON.parse(have.slice(head + 4, head + 4 + n)));
        have = have.slice(head + 4 + n);
        if (++at === requests.length) { c.destroy(); resolve(got); } else c.write(requests[at]);
      }
    });
    c.write(requests[0]);
  });
  assert.deepEqual(all, [expected[0], expected[1], expected[0]]);
});

test('a client that asks on and on and reads nothing is held, and loses nothing', async () => {
  const n = 300;
  const one = httpBytes('POST', '/tokenize', { content: text(40000), with_pieces: true });
  const asked = async () => (await server.metrics()).get('islet_gateway_http_requests_total');
  const first = await asked();
  const c = createConnection(server.port, '127.0.0.1');
  c.pause().write(Buffer.concat(Array(n).fill(one)));
  let seen = -1, own = 0;
  await server.until('it is held', async () => {
    const now = (await asked()) - first - ++own; // each look is a request too
    const same = now === seen;
    seen = now;
    return same && now > 1;
  });
  assert.ok(seen < n, `${seen} of ${n} requests were read while no answer was`);
  assert.ok(residentMiB() < (slow > 1 ? Infinity : 64), `${residentMiB()} MiB`);
  let rest = '', answers = 0;
  await new Promise((resolve, reject) => {
    c.setEncoding('latin1').on('error', reject).on('close', () => reject(new Error(`closed after ${answers} answers`)));
    c.resume().on('data', (d) => {
      const parts = (rest + d).split('HTTP/1.1 200 OK');
      rest = parts.pop();
      answers += parts.length;
      if (answers === n && rest.endsWith(']}')) { c.removeAllListeners('close').destroy(); resolve(); }
    });
  });
  assert.equal(answers, n);
});

test('a client that leaves while its body is worked on', async () => {
  const body = httpBytes('POST', '/v1/chat/completions', { messages: [{ role: 'user', content: text(4 * MiB) }] });
  const leave = () => new Promise((resolve) => {
    const c = createConnection(server.port, '127.0.0.1', () => c.write(body, () => { c.destroy(); resolve(); }));
    c.on('error', resolve);
  });
  const connections = async () => (await server.metrics()).get('islet_gateway_connections');
  const before = await connections();
  await Promise.all(Array.from({ length: 12 }, leave));
  await server.until('nothing is left of them', async () => (await connections()) <= before + 1);
  assert.equal((await post('/tokenize', { content: 'abc' })).status, 200);
});

test('others are answered while a large body is worked on', async () => {
  const [pathname, make] = bodies['too many messages'];
  const body = httpBytes('POST', pathname, make());
  let worked = false, others = 0, answered = 0;
  const ping = async () => { while (answered < 4) { await (await server.get('/livez')).text(); others += worked; } };
  const one = () => new Promise((resolve, reject) => {
    const c = createConnection(server.port, '127.0.0.1', () => c.write(body, () => { worked = true; }));
    c.on('error', reject).on('data', () => { worked = false; answered++; c.destroy(); resolve(); });
  });
  const pings = ping();
  for (let i = 0; i < 4; i++) await one();
  await pings;
  assert.ok(others >= 12, `${others} answers while four bodies were worked on`);
});

test('the memory of large bodies goes back', async () => {
  for (const [pathname, make] of Object.values(bodies)) await post(pathname, make());
  await server.until('under 64 MiB', async () => residentMiB() < (slow > 1 ? Infinity : 64));
});
