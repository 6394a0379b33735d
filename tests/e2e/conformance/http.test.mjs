// W1-W21: what files of e2e/wire cannot say of HTTP.
import test, { after, afterEach, before } from 'node:test';
import { assert, ask, httpBytes, parseResponse, raw, rawPost, startServer, stream } from '../clients/server.mjs';

let server;
before(async () => { server = await startServer(); });
after(() => server?.stop());
afterEach(async () => assert.equal((await server.get('/livez')).status, 200));

const C = { messages: [{ role: 'user', content: 'hi' }], max_tokens: 4, temperature: 0 };
const chatPath = '/v1/chat/completions';
const head = (more, path = chatPath) => `POST ${path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n${more}\r\n`;

// All of an answer but what is no function of the request.
const fixed = (r) => {
  const { id, created, timings, usage, ...rest } = JSON.parse(r.body);
  assert.match(id, /^chatcmpl-[A-Za-z0-9]{24}$/);
  assert.ok(Math.abs(created - Date.now() / 1000) < 600 && timings.predicted_n >= 0);
  const { prompt_tokens_details, islet, ...counts } = usage;
  return { ...rest, usage: counts };
};

test('W1, W2 the same body with a length, again on the connection, and in chunks of one byte', async () => {
  const body = JSON.stringify(C);
  const first = await rawPost(server, chatPath, body, { keepOpen: true });
  assert.equal(first.status, 200);
  assert.equal(Number(first.headers['content-length']), first.body.length);
  assert.equal(first.headers['content-type'], 'application/json');
  assert.equal(first.headers.connection, 'keep-alive');
  const chunks = [...body].map((c) => `1\r\n${c}\r\n`).join('');
  for (const bytes of [httpBytes('POST', chatPath, body), `${head('Transfer-Encoding: chunked\r\n')}${chunks}0\r\n\r\n`]) {
    const again = await on(first.connection, bytes);
    assert.equal(again.status, 200);
    assert.deepEqual(fixed(again), fixed(first));
  }
  first.connection.destroy();
});

// One exchange on a connection that is open.
function on(c, bytes) {
  return new Promise((resolve, reject) => {
    let all = Buffer.alloc(0);
    c.removeAllListeners();
    c.on('error', reject).on('close', () => reject(new Error(`closed; got ${all}`)));
    c.on('data', (d) => {
      all = Buffer.concat([all, d]);
      const r = parseResponse(all);
      if (r.complete) resolve(r);
    });
    c.write(bytes);
  });
}

test('every response has its headers', async () => {
  const every = [['GET', '/livez'], ['GET', '/nothing'], ['DELETE', chatPath], ['POST', chatPath, '{'], ['POST', chatPath, C], ['POST', chatPath, { ...C, stream: true }], ['FOO', '/'], ['OPTIONS', '/livez']];
  for (const [method, path, body] of every) {
    const r = await raw(server, httpBytes(method, path, body));
    const what = `${method} ${path} ${r.status}`;
    assert.match(r.headers.date, /^[A-Z][a-z]{2}, \d\d [A-Z][a-z]{2} \d{4} \d\d:\d\d:\d\d GMT$/, what);
    assert.match(r.headers.server, /^islet\/\d/, what);
    assert.match(r.headers['x-request-id'], /^req_[0-9a-f]{24}$/, what);
    const sse = r.headers['content-type']?.startsWith('text/event-stream');
    assert.equal(r.headers['cache-control'], sse ? 'no-cache' : 'no-store', what);
    if (r.status >= 400) {
      assert.equal(r.headers['content-type'], 'application/json', what);
      const { error } = JSON.parse(r.body);
      assert.deepEqual(Object.keys(error), ['message', 'type', 'param', 'code'], what);
      for (const k of ['message', 'type', 'code']) assert.equal(typeof error[k], 'string', what);
    }
    if (path === chatPath && r.status === 200) assert.match(r.headers['openai-processing-ms'], /^\d+$/, what);
    if (r.status !== 503) assert.equal(r.headers['retry-after'], undefined, what);
    assert.equal(r.headers['keep-alive'], r.headers.connection === 'close' ? undefined : 'timeout=75', what);
  }
});

test('W8 nothing but Expect brings a 1xx, and a check that fails comes instead of it', async () => {
  const body = JSON.stringify(C);
  const expect = `Expect: 100-continue\r\nContent-Length: ${body.length}\r\n`;
  for (const [more, path, status] of [[expect, chatPath, 100], [expect, '/nothing', 404], [expect, '/livez', 405], [`${expect}Content-Encoding: gzip\r\n`, chatPath, 415],
    [`${expect}Origin: https://evil.example\r\n`, chatPath, 403], ['Expect: 100-continue\r\nContent-Length: 16777217\r\n', chatPath, 413]]) {
    const c = server.connect();
    const text = await new Promise((resolve) => {
      let all = '';
      c.on('data', (d) => { all += d; if (status === 100 && all.endsWith('\r\n\r\n')) resolve(all); }).on('close', () => resolve(all));
      c.write(head(more, path));
    });
    assert.equal(text.slice(0, 13), `HTTP/1.1 ${status} `, more + path);
    if (status === 100) {
      assert.equal(text, 'HTTP/1.1 100 Continue\r\n\r\n');
      const r = await on(c, body);
      assert.equal(r.status, 200);
    } else {
      assert.match(text, /\r\nConnection: close\r\n/);
    }
    c.destroy();
  }
  // A body that takes its time, and no Expect: raw() refuses any 1xx.
  const c = server.connect();
  c.write(head(`Content-Length: ${body.length}\r\n`));
  await new Promise((resolve) => setTimeout(resolve, 300));
  assert.equal((await on(c, body)).status, 200);
  c.destroy();
});

test('W10 two requests in one piece are two whole answers, in order', async () => {
  const two = Buffer.concat([httpBytes('POST', chatPath, C, { 'x-request-id': 'one' }), httpBytes('POST', chatPath, { ...C, max_tokens: 1 }, { 'x-request-id': 'two' })]);
  const first = await raw(server, two, { keepOpen: true, onData() {} });
  let rest = first.raw.subarray(first.headSize + first.body.length);
  const second = await new Promise((resolve) => {
    const look = () => { const r = parseResponse(rest); if (r.complete) resolve(r); };
    first.connection.on('data', (d) => { rest = Buffer.concat([rest, d]); look(); });
    look();
  });
  assert.deepEqual([first.headers['x-request-id'], second.headers['x-request-id']], ['one', 'two']);
  assert.equal(JSON.parse(first.body).usage.completion_tokens, 4);
  assert.equal(JSON.parse(second.body).usage.completion_tokens, 1);
  first.connection.destroy();
});

test('W11 HEAD has the headers of GET and no body', async () => {
  const id = (await (await server.get('/v1/models')).json()).data[0].id;
  await rawPost(server, chatPath, { ...C, stream: true }, { headers: { 'x-request-id': 'head-stream' } });
  for (const path of ['/', '/livez', '/readyz', '/health', '/v1/health', '/metrics', '/status', '/v1/models', '/models', `/v1/models/${encodeURIComponent(id)}`, '/v1/models/absent', '/nothing', '/v1/requests/head-stream']) {
    const get = await raw(server, httpBytes('GET', path));
    const got = await new Promise((resolve) => {
      const c = server.connect();
      let all = '';
      c.setEncoding('latin1').on('data', (d) => { all += d; }).on('close', () => resolve(all));
      c.write(`HEAD ${path} HTTP/1.1\r\nHost: localhost\r\n\r\nGET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n`);
    });
    const [own, behind] = got.split(/(?=HTTP\/1\.1 )/);
    assert.ok(own.endsWith('\r\n\r\n') && own.indexOf('\r\n\r\n') === own.length - 4, `${path}: a body`);
    const r = parseResponse(Buffer.from(own));
    assert.equal(r.status, get.status, path);
    assert.deepEqual(Object.keys(r.headers), Object.keys(get.headers), path);
    for (const k of ['content-type', 'transfer-encoding', 'cache-control', 'connection']) assert.equal(r.headers[k], get.headers[k], path);
    if (!/metrics|status/.test(path)) assert.equal(r.headers['content-length'], get.headers['content-length'], path);
    assert.match(behind, /^HTTP\/1\.1 200 /, path);
  }
});

test('the body of / is the name and the version', async () => {
  const r = await raw(server, httpBytes('GET', '/'));
  assert.equal(r.headers['content-type'], 'text/plain');
  assert.equal(r.body.toString(), r.headers.server.replace('/', ' '));
});

test('W18 a reader that takes nothing holds up nobody', async () => {
  const c = server.connect();
  c.pause().write(httpBytes('POST', chatPath, ask('Tell me a story.', { ignore_eos: true, stream: true, max_tokens: 1500, logprobs: true, top_logprobs: 20 })));
  await server.until('it runs', async () => (await server.status()).gateway.running === 1);
  for (let i = 0; i < 3; i++) assert.equal((await stream(server, ask('What is the capital of Norway?'))).content, 'The capital of Norway is Oslo.');
  c.destroy();
  await server.idle();
});

test('S16 and S12 by hand: a form that a browser can send reaches no handler', async () => {
  const before = await server.metrics();
  for (const more of ['Content-Type: text/plain\r\nOrigin: http://localhost\r\n', 'Content-Type: text/plain\r\nSec-Fetch-Site: same-site\r\n', 'Content-Type: text/plain\r\nSec-Fetch-Site: cross-site\r\n', 'Content-Type: text/plain\r\nOrigin: null\r\n']) {
    const body = JSON.stringify(C);
    const r = await raw(server, `POST ${chatPath} HTTP/1.1\r\nHost: localhost\r\n${more}Content-Length: ${body.length}\r\n\r\n${body}`);
    assert.ok([403, 415].includes(r.status), more);
  }
  assert.equal((await server.metrics()).get('islet_gateway_admitted_total'), before.get('islet_gateway_admitted_total'));
});
