// W1-W21: what files of e2e/wire cannot say of HTTP.
import test, { after, afterEach, before } from 'node:test';
import { spawnSync } from 'node:child_process';
import { statSync } from 'node:fs';
import path from 'node:path';
import { assert, ask, bin, httpBytes, parseResponse, raw, rawPost, sleep, slow, startServer, stream, thinkModel, tinymoe } from '../clients/server.mjs';

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

test('W7 a body of 16 MiB is read, one byte more is not', async () => {
  const text = JSON.stringify(C);
  for (const [bytes, status] of [[1 << 24, 200], [(1 << 24) + 1, 413]]) {
    const r = await rawPost(server, chatPath, text.padEnd(bytes));
    assert.equal(r.status, status, `${bytes} bytes`);
    const chunked = await raw(server, Buffer.concat([Buffer.from(`${head('Transfer-Encoding: chunked\r\n')}${bytes.toString(16)}\r\n`), Buffer.from(text.padEnd(bytes)), Buffer.from('\r\n0\r\n\r\n')]));
    assert.equal(chunked.status, status, `${bytes} bytes in a chunk`);
    if (status === 413) for (const x of [r, chunked]) assert.deepEqual([JSON.parse(x.body).error.code, x.headers.connection], ['body_too_large', 'close']);
  }
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
  c.pause().write(httpBytes('POST', chatPath, ask('Tell me a story.', { ignore_eos: true, stream: true, max_tokens: 1500, logprobs: true, top_logprobs: 20, n: 8 }), { 'x-request-id': 'not-reading' }));
  await server.until('it runs', async () => (await server.status()).gateway.running === 1);
  for (let i = 0; i < 3; i++) assert.equal((await stream(server, ask('What is the capital of Norway?'))).content, 'The capital of Norway is Oslo.');
  assert.ok(!server.gateway.lines.some((l) => l.includes('client_gone id=not-reading')), 'it waits, and is not given up yet');
  c.destroy();
  await server.idle();
});

test('W19 the end of a client is seen within 100 ms and ends the work: in the queue, in prefill, in decode', async () => {
  const s = await startServer({ set: { 'batch.max_sequences': '1', 'batch.prefill_chunk': '8' } });
  const long = (content, streamed, id) => httpBytes('POST', chatPath, ask(content, { ignore_eos: true, cache_prompt: false, stream: streamed }), { 'x-request-id': id });
  let n = 0;
  const begin = (content, streamed) => { const c = s.connect(); c.id = `leaves-${n++}`; c.on('error', () => {}).resume().write(long(content, streamed, c.id)); return c; };
  const figure = (name, value) => s.until(`${name} is ${value}`, async () => (await s.status()).gateway[name] === value);
  const line = async (p, start, wanted) => {
    for (let at = p.lines.length; ; await sleep(1)) {
      for (; at < p.lines.length; at++) if (wanted.test(p.lines[at])) return performance.now() - start;
      assert.ok(performance.now() - start < 5000 * slow, `no line ${wanted}`);
    }
  };
  // The gateway tells the worker in the turn of its loop in which it sees the end; the worker's line comes behind the step that
  // runs then. Of a queued one the worker never heard.
  const leave = async (c, how, queued = false) => {
    const start = performance.now();
    const seen = line(s.gateway, start, new RegExp(`client_gone id=${c.id}$`));
    const ended = queued ? 0 : line(s.worker, start, new RegExp(`request done trace=${c.id} .*finish=cancelled`));
    how(c);
    return { seen: await seen, ended: await ended };
  };
  try {
    for (const how of [(c) => c.destroy(), (c) => c.end(), (c) => c.resetAndDestroy()]) {
      const ms = [];
      for (const streamed of [true, false]) {
        const running = begin('Tell me a story.', streamed);
        await figure('running', 1);
        const queued = begin('Tell me a story.', streamed);
        await figure('queued', 1);
        ms.push(await leave(queued, how, true), await leave(running, how));
        assert.ok(!s.worker.lines.some((l) => l.includes(`trace=${queued.id}`)), 'a queued request never reaches the worker');
        await figure('running', 0);
        const read = begin('x is '.repeat(800), streamed);
        await figure('running', 1);
        ms.push(await leave(read, how));
        await s.idle();
        await figure('queued', 0);
        await figure('running', 0);
      }
      // One of them may have met a busy machine.
      const of = (what) => ms.map((t) => t[what]).sort((a, b) => a - b);
      assert.ok(of('seen').at(-2) < 100 * slow, `seen after ${of('seen')} ms`);
      assert.ok(of('ended').at(-2) < 500 * slow, `ended after ${of('ended')} ms`);
    }
  } finally {
    await s.stop();
  }
});

test('W9 over HTTP/1.0 a slow answer is padded until the close, and one that fails is reset', async () => {
  const s = await startServer({ restart: false, set: { 'server.json_pad_after': '200 ms', 'worker.resume_deadline': '1 s' }, allow: [/./] });
  const old = () => new Promise((resolve) => {
    const c = s.connect();
    let all = Buffer.alloc(0), error = null;
    c.on('data', (d) => { all = Buffer.concat([all, d]); if (all.includes('\r\n\r\n ')) s.worker.kill(next); });
    c.on('error', (e) => { error = e; }).on('close', () => resolve({ ...parseResponse(all), error }));
    c.write(httpBytes('POST', chatPath, C).toString().replace('HTTP/1.1', 'HTTP/1.0'));
  });
  let next = 'SIGCONT';
  try {
    s.worker.kill('SIGSTOP');
    const padded = await old();
    assert.equal(padded.status, 200);
    assert.deepEqual([padded.headers['transfer-encoding'], padded.headers['content-length'], padded.headers.connection, padded.error], [undefined, undefined, 'close', null]);
    assert.match(padded.body.toString('latin1'), /^ \{.*\}$/);
    assert.equal(JSON.parse(padded.body).object, 'chat.completion');
    next = 'SIGKILL';
    s.worker.kill('SIGSTOP');
    const broken = await old();
    assert.equal(broken.body.toString(), ' ');
    assert.equal(broken.error?.code, 'ECONNRESET', 'the close would look like the end');
  } finally {
    await s.stop();
  }
});

test('what is only looked at is answered to a client that has sent its last byte', async () => {
  for (const path of ['/livez', '/readyz', '/status', '/metrics', '/v1/models', '/nothing']) {
    const r = await raw(server, httpBytes('GET', path), { writeEnd: true });
    assert.equal(r.status, path === '/nothing' ? 404 : 200, path);
    assert.equal(r.complete, true, path);
  }
  const r = await raw(server, httpBytes('POST', chatPath, { ...C, max_tokens: 1900, ignore_eos: true }), { writeEnd: true });
  assert.deepEqual([r.status, r.raw.length], [0, 0], 'what would be worked for is cancelled');
  await server.idle();
});

test('W61 the retries that a client counts are in the log', async () => {
  await rawPost(server, chatPath, C, { headers: { 'x-request-id': 'third-try', 'x-stainless-retry-count': '2' } });
  await server.until('the line', () => server.gateway.lines.some((l) => l.includes('third-try') && l.endsWith(' retry=2')));
  for (const [id, value] of [['no-count', 'a b=c'], ['long-count', '12345678'], ['sign-count', '-1']]) {
    await rawPost(server, chatPath, C, { headers: { 'x-request-id': id, 'x-stainless-retry-count': value } });
    await server.until('the line', () => server.gateway.lines.some((l) => l.includes(id) && l.endsWith(' retry=0')));
  }
});

test('no model file: 503 with the file and the remedy, and the server lives', async () => {
  const s = await startServer({ model: '/nowhere/there-is-no.gguf', startWorker: false, ready: false, allow: [/no_model/] });
  try {
    for (const path of [chatPath, '/v1/completions', '/tokenize', '/apply-template']) {
      const r = await rawPost(s, path, C);
      const { error } = JSON.parse(r.body);
      assert.deepEqual([r.status, error.code, error.type, error.param], [503, 'configuration', 'server_error', null], path);
      assert.match(error.message, /there-is-no\.gguf.*model\.path/s);
      assert.match(r.headers['retry-after'], /^([1-9]|[12][0-9]|30)$/);
    }
    const ready = await raw(s, httpBytes('GET', '/readyz'));
    assert.deepEqual([ready.status, JSON.parse(ready.body).status, JSON.parse(ready.body).error.code], [503, 'configuration', 'configuration']);
    for (const path of ['/livez', '/status', '/metrics', '/']) assert.equal((await s.get(path)).status, 200, path);
  } finally {
    await s.stop();
  }
});

test('a worker with another model: 500 model_error', async () => {
  const s = await startServer({ startWorker: false, ready: false, allow: [/unusable/] });
  try {
    s.worker.args = s.worker.args.map((a) => (a.startsWith('model.path=') ? `model.path=${thinkModel()}` : a));
    s.worker.start();
    await s.until('it is seen', async () => (await s.status()).state === 'model_error');
    const ready = await raw(s, httpBytes('GET', '/readyz'));
    assert.deepEqual([ready.status, JSON.parse(ready.body).status, JSON.parse(ready.body).error.code], [503, 'configuration', 'model_error']);
    for (const streamed of [false, true]) {
      const r = await rawPost(s, chatPath, { ...C, stream: streamed });
      const { error } = JSON.parse(r.body);
      assert.deepEqual([r.status, error.code, error.type], [500, 'model_error', 'server_error']);
      assert.equal(r.headers['retry-after'], undefined);
    }
  } finally {
    await s.stop();
  }
});

test('the Unix socket is for user and group alone', () => {
  assert.equal(statSync(server.socket).mode & 0o777, 0o660);
});

test('an address beyond loopback asks for keys', () => {
  const r = spawnSync(path.join(bin, 'islet-gateway'), ['--set', `model.path=${tinymoe}`, '--set', 'server.listen=0.0.0.0:0', '--set', 'server.socket=off'], { encoding: 'utf8', timeout: 20000, env: server.env });
  assert.equal(r.status, 78);
  assert.match(r.stderr, /server\.listen.*server\.api_key_file/);
});

test('W17 a form that a browser can send reaches no handler', async () => {
  const before = await server.metrics();
  for (const more of ['Content-Type: text/plain\r\nOrigin: http://localhost\r\n', 'Content-Type: text/plain\r\nSec-Fetch-Site: same-site\r\n', 'Content-Type: text/plain\r\nSec-Fetch-Site: cross-site\r\n', 'Content-Type: text/plain\r\nOrigin: null\r\n']) {
    const body = JSON.stringify(C);
    const r = await raw(server, `POST ${chatPath} HTTP/1.1\r\nHost: localhost\r\n${more}Content-Length: ${body.length}\r\n\r\n${body}`);
    assert.ok([403, 415].includes(r.status), more);
  }
  assert.equal((await server.metrics()).get('islet_gateway_admitted_total'), before.get('islet_gateway_admitted_total'));
});
