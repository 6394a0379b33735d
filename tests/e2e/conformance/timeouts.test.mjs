// W3, W4, W18 and idle connections in real time, all at once: what the fake clock of the unit tests says, through the loop.
import test, { after, before, describe } from 'node:test';
import { createConnection } from 'node:net';
import { assert, ask, httpBytes, parseResponse, sleep, slow, startServer, stream } from '../clients/server.mjs';

let server;
before(async () => { server = await startServer(); });
after(() => server?.stop());

const C = { messages: [{ role: 'user', content: 'hi' }], max_tokens: 1, temperature: 0 };
const bytes = httpBytes('POST', '/v1/chat/completions', C);
const head = 'POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 4000\r\n\r\n';

// What came until the server closed, and after how many seconds that was. `feed` writes as it likes.
async function untilClosed(feed) {
  const c = server.connect(), start = performance.now();
  let all = Buffer.alloc(0), open = true, ended = 0;
  c.on('error', () => {}).on('data', (d) => { all = Buffer.concat([all, d]); ended = performance.now(); });
  const closed = new Promise((resolve) => c.on('close', () => { open = false; resolve(); }));
  await feed(c, () => open && ended === 0);
  await closed;
  return { ...parseResponse(all), bytes: all.length, seconds: ((ended || performance.now()) - start) / 1000 };
}

const at = (r, limit) => assert.ok(r.seconds > limit - 0.5 && r.seconds < limit + 5 * slow, `${r.seconds} s, the limit is ${limit} s`);
const timedOut = (r, limit) => {
  assert.equal(r.status, 408, `after ${r.seconds} s`);
  assert.equal(JSON.parse(r.body).error.code, 'request_timeout');
  assert.equal(r.headers.connection, 'close');
  assert.match(r.headers['x-request-id'], /^req_/);
  at(r, limit);
};

describe('limits of time', { concurrency: true }, () => {
  test('W3 a head byte by byte over 2 s is served', async () => {
    const end = bytes.indexOf('\r\n\r\n') + 4;
    const r = await untilClosed(async (c) => {
      c.setNoDelay(true);
      for (let i = 0; i < end; i++) { c.write(bytes.subarray(i, i + 1)); await sleep(2000 / end); }
      c.write(bytes.subarray(end));
      setTimeout(() => c.destroy(), 3000 * slow);
    });
    assert.equal(r.status, 200);
  });

  test('W3 a head that stalls is 408 after 10 s', async () => timedOut(await untilClosed((c) => { c.write(bytes.subarray(0, 30)); }), 10));

  test('W3 no byte for 30 s is a close without one', async () => {
    const r = await untilClosed(() => {});
    assert.equal(r.bytes, 0);
    at(r, 30);
  });

  test('W4 a body that stalls is 408 after 10 s', async () => timedOut(await untilClosed((c) => { c.write(head + '{'); }), 10));

  test('W4 a body of 100 bytes a second is 408 after 10 s', async () => {
    timedOut(await untilClosed(async (c, open) => {
      c.write(head);
      while (open()) { c.write(' '.repeat(10)); await sleep(100); }
    }), 10);
  });

  test('W4 a body that goes on for too long is 408 after 60 s', async () => {
    timedOut(await untilClosed(async (c, open) => {
      c.write(head.replace('4000', '4000000'));
      while (open()) { c.write(' '.repeat(500)); await sleep(100); }
    }), 60);
  });

  test('W18 a reader that takes nothing is cancelled after 60 s, and others are not', async () => {
    const story = ask('Tell me a story.', { ignore_eos: true, max_tokens: 800, logprobs: true, top_logprobs: 20, stream: true });
    const before = (await server.metrics()).get('islet_gateway_cancelled_total');
    const c = createConnection(server.socket), start = performance.now();
    c.on('error', () => {}).pause().write(httpBytes('POST', '/v1/chat/completions', story, { 'x-request-id': 'stalled' }));
    let others = 0, cancelled = 0;
    while (!cancelled) {
      assert.equal((await stream(server, ask('What is the capital of Norway?'))).content, 'The capital of Norway is Oslo.');
      others++;
      await sleep(500);
      if ((await server.metrics()).get('islet_gateway_cancelled_total') > before || server.gateway.lines.some((l) => l.includes('stalled unsent_bytes'))) cancelled = performance.now();
      assert.ok(performance.now() - start < 75000 * slow, 'never');
    }
    const seconds = (cancelled - start) / 1000;
    assert.ok(seconds > 59 && seconds < 66 * slow, `${seconds} s`);
    assert.ok(others > 10, `${others} others`);
    assert.ok(server.gateway.lines.some((l) => l.includes('client_gone id=stalled')), 'its request is cancelled');
    await server.idle();
    c.destroy();
  });

  test('W21 an idle connection is closed after 90 s, not before the 75 s that it announces', async () => {
    const start = performance.now();
    const r = await untilClosed((c) => { c.write(httpBytes('GET', '/livez')); });
    assert.equal(r.status, 200);
    assert.equal(r.headers['keep-alive'], 'timeout=75');
    at({ seconds: (performance.now() - start) / 1000 }, 90);
  });
});
