// W21 and rows 8 and 9: time-outs and reuse of connections in Node's HTTP client.
import test, { after, before } from 'node:test';
import { Agent, Pool, fetch as ufetch, request } from 'undici';
import { assert, ask, startServer, sleep, events, assemble } from './server.mjs';

let server;
before(async () => { server = await startServer({ set: { 'server.json_pad_after': '1 s', 'server.sse_ping_interval': '1 s' } }); });
after(() => server?.stop());

const body = (extra) => JSON.stringify(ask('What is the capital of Norway?', extra));
const post = { method: 'POST', headers: { 'content-type': 'application/json' } };

// The worker stands still for so long.
async function pause(ms) {
  server.worker.kill('SIGSTOP');
  await sleep(ms);
  server.worker.kill('SIGCONT');
}

test('row 8: a slow JSON answer survives a header time-out', async () => {
  const dispatcher = new Agent({ headersTimeout: 1500, bodyTimeout: 60000 });
  const paused = pause(4000);
  const r = await ufetch(`${server.v1}/chat/completions`, { ...post, body: body(), dispatcher });
  const json = await r.json();
  assert.equal(json.choices[0].message.content, 'The capital of Norway is Oslo.');
  await paused;
  await dispatcher.close();
});

test('row 9: a silent stream survives a body time-out', async () => {
  const dispatcher = new Agent({ bodyTimeout: 1500 });
  const paused = pause(4000);
  const r = await ufetch(`${server.v1}/chat/completions`, { ...post, body: body({ stream: true }), dispatcher });
  const e = events(Buffer.from(await r.arrayBuffer()));
  assert.ok(e.comments >= 2, `${e.comments} comments`);
  assert.equal(assemble(e.list).content, 'The capital of Norway is Oslo.');
  await paused;
  await dispatcher.close();
});

test('W21 requests at +0, +1.2 s and +6.2 s use one connection', async () => {
  let connections = 0;
  const pool = new Pool(server.base, { connections: 1 });
  pool.on('connect', () => connections++);
  for (const wait of [0, 1200, 5000]) {
    await sleep(wait);
    const r = await request(`${server.base}/livez`, { dispatcher: pool });
    assert.equal(r.statusCode, 200);
    assert.match(r.headers['keep-alive'], /timeout=75/);
    await r.body.dump();
  }
  assert.equal(connections, 1);
  await pool.close();
});
