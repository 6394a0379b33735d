// W47-W55: streams, waiting, and the end of things.
import test, { after, afterEach, before } from 'node:test';
import { createConnection } from 'node:net';
import { OpenAI } from '../clients/official.mjs';
import { assert, ask, assemble, chat, events, httpBytes, parseResponse, rawPost, sleep, slow, startServer, stream, thinkModel } from '../clients/server.mjs';

let server;
before(async () => { server = await startServer({ set: { 'server.sse_ping_interval': '1 s', 'server.json_pad_after': '1 s' } }); });
after(() => server?.stop());
afterEach(async () => assert.equal((await server.get('/livez')).status, 200));

const norway = ask('What is the capital of Norway?');
const answer = 'The capital of Norway is Oslo.';
const long = ask('Tell me a story.', { ignore_eos: true, max_tokens: 1800 });

async function pause(s, ms) {
  s.worker.kill('SIGSTOP');
  await sleep(ms);
  s.worker.kill('SIGCONT');
}

test('W47 the exact sequence', async () => {
  const r = await rawPost(server, '/v1/chat/completions', { ...norway, stream: true, stream_options: { include_usage: true } });
  assert.equal(r.status, 200);
  assert.equal(r.headers['content-type'], 'text/event-stream; charset=utf-8');
  assert.equal(r.headers['cache-control'], 'no-cache');
  assert.equal(r.headers['x-accel-buffering'], 'no');
  assert.equal(r.headers['transfer-encoding'], 'chunked');
  assert.ok(r.headers['x-request-id']);
  const { list, done } = events(r.body);
  assert.equal(done, 1);
  assert.ok(r.body.toString().endsWith('data: [DONE]\n\n'));
  assert.equal(new Set(list.map((e) => e.id)).size, 1);
  assert.equal(new Set(list.map((e) => e.created)).size, 1);
  for (const e of list) {
    assert.equal(e.object, 'chat.completion.chunk');
    assert.deepEqual(Object.keys(e).slice(0, 5), ['id', 'object', 'created', 'model', 'system_fingerprint']);
  }
  assert.deepEqual(list[0].choices[0].delta, { role: 'assistant', content: '' });
  assert.equal(list[0].choices[0].finish_reason, null);
  const texts = list.slice(1, -2);
  for (const e of texts) {
    assert.deepEqual(Object.keys(e.choices[0].delta), ['content']);
    assert.ok(e.choices[0].delta.content.length > 0);
  }
  assert.equal(texts.map((e) => e.choices[0].delta.content).join(''), answer);
  const finish = list.at(-2);
  assert.deepEqual(finish.choices[0].delta, {});
  assert.equal(finish.choices[0].finish_reason, 'stop');
  assert.equal(finish.choices[0].stop_reason, null);
  assert.ok(finish.timings.predicted_n > 0);
  assert.deepEqual(list.at(-1).choices, []);
  assert.ok(list.at(-1).usage.total_tokens > 0);
  assert.ok(list.slice(0, -1).every((e) => e.usage === null));
  // The terminator comes with the last event, not later.
  const at = r.raw.indexOf('[DONE]');
  const before = r.times.find((t) => at < t.from + t.n).at;
  assert.ok(r.times.at(-1).at - before < 50 * slow, 'the end comes at once');
});

test('W48 include_usage false and absent: no key', async () => {
  for (const stream_options of [undefined, { include_usage: false }]) {
    const s = await stream(server, { ...norway, stream_options });
    assert.ok(s.list.every((e) => !('usage' in e)));
    assert.equal(s.content, answer);
  }
});

test('W49 headers come while the request waits; comments as asked', async () => {
  server.worker.kill('SIGSTOP');
  const opened = new Promise((resolve) => {
    const start = performance.now();
    const c = createConnection(server.port, '127.0.0.1');
    let all = Buffer.alloc(0), headAt = 0;
    c.write(httpBytes('POST', '/v1/chat/completions', { ...norway, stream: true }));
    c.on('data', (d) => {
      all = Buffer.concat([all, d]);
      if (headAt === 0 && all.includes('\r\n\r\n')) headAt = performance.now() - start;
      const r = parseResponse(all);
      if (r.complete) { c.destroy(); resolve({ headAt, ...r }); }
    });
  });
  const silent = stream(server, { ...norway, sse_ping_interval: -1 });
  await sleep(2600);
  server.worker.kill('SIGCONT');
  const r = await opened;
  assert.ok(r.headAt < 1000 * slow, `head after ${r.headAt} ms`);
  const e = events(r.body);
  assert.ok(e.comments >= 2 && e.comments <= 4, `${e.comments} comments`);
  assert.equal(assemble(e.list).content, answer);
  const s = await silent;
  assert.equal(s.comments, 0);
  assert.equal(s.content, answer);
});

test('W50 errors before and after admission', async () => {
  const early = await stream(server, { ...norway, temperature: 11 });
  assert.equal(early.status, 400);
  assert.equal(early.headers['content-type'], 'application/json');
  const s = await startServer({ restart: false, set: { 'worker.resume_deadline': '1 s' }, allow: [/./] });
  try {
    const r = await rawPost(s, '/v1/chat/completions', { ...long, stream: true, stream_options: { include_usage: true } }, {
      onData: (d) => { if (d.includes('"content":"') && s.worker.alive) s.worker.kill(); } });
    assert.equal(r.complete, true, 'the zero chunk came');
    const e = events(r.body);
    assert.equal(e.done, 1);
    const all = assemble(e.list);
    assert.equal(all.error.code, 'worker_unavailable');
    assert.equal(all.finishes, 0, 'no finish chunk');
    assert.ok(all.content.length > 0);
    const later = await chat(s, norway);
    assert.equal(later.status, 503);
    assert.equal(later.json.error.code, 'worker_unavailable');
    assert.match(later.headers['retry-after'], /^([1-9]|[12][0-9]|30)$/);
  } finally {
    await s.stop();
  }
});

test('W50 a killed gateway breaks the connection visibly', async () => {
  const s = await startServer({ restart: false, allow: [/./] });
  try {
    const r = await rawPost(s, '/v1/chat/completions', { ...long, stream: true }, {
      onData: (d) => { if (d.includes('"content":"')) s.gateway.kill(); } });
    assert.equal(r.ended, true);
    assert.equal(r.complete, false, 'no terminator');
    assert.ok(!r.body.includes('[DONE]'));
  } finally {
    await s.stop();
  }
});

test('W51 a worker killed at token 0, 1, 7 and the last: the undisturbed text', async () => {
  const story = ask('How do I make pancakes?', { temperature: 0, stream_options: { include_usage: true } });
  const plain = await stream(server, story);
  for (const k of [0, 1, 7, plain.usage.completion_tokens - 1]) {
    const s = await startServer({ workerEnv: { ISLET_CRASH_AT: `engine.token:${k + 1}` } });
    try {
      const r = await stream(s, { ...story, sse_ping_interval: 1 });
      assert.equal(r.content, plain.content, `token ${k}`);
      assert.equal(r.finish, plain.finish);
      assert.equal(r.usage.completion_tokens, plain.usage.completion_tokens);
      assert.equal(r.usage.islet.resumed, 1);
      assert.equal(s.worker.starts, 2);
    } finally {
      await s.stop();
    }
  }
});

test('W52 whole UTF-8 in every event, read byte by byte', async () => {
  const s = await startServer({ model: thinkModel() });
  try {
    const r = await rawPost(s, '/v1/chat/completions', { ...ask('Hi'), stream: true });
    for (const block of r.body.toString('latin1').split('\n\n').filter((b) => b.startsWith('data: {'))) {
      const bytes = Buffer.from(block.slice(6), 'latin1');
      JSON.parse(new TextDecoder('utf-8', { fatal: true }).decode(bytes));
    }
    const deltas = events(r.body).list.map((e) => e.choices[0]?.delta?.content ?? '').filter((t) => t.includes('\u{1F600}'));
    assert.equal(deltas.length, 1, 'an emoji of four tokens is in one event');
    // An SSE event is not cut over two chunks.
    for (const c of r.chunks) assert.ok(c.toString().endsWith('\n\n'));
  } finally {
    await s.stop();
  }
});

test('W53 a full queue', async () => {
  const s = await startServer({ set: { 'server.queue': '1', 'batch.max_sequences': '1' } });
  try {
    const controller = new AbortController();
    s.worker.kill('SIGSTOP');
    const body = JSON.stringify(norway);
    const start = () => fetch(`${s.v1}/chat/completions`, { method: 'POST', headers: { 'content-type': 'application/json' }, body, signal: controller.signal }).catch((e) => e);
    // How many are with the worker before the queue counts is the gateway's business: fill until one is refused.
    const waiting = [];
    let full = null;
    for (let i = 0; i < 80 && full === null; i++) {
      const r = await Promise.race([start(), sleep(150)]);
      if (r) full = r; else waiting.push(i);
    }
    assert.ok(full, 'refused at last');
    assert.equal(full.status, 503);
    assert.match(full.headers.get('retry-after'), /^([1-9]|[12][0-9]|30)$/);
    const json = await full.json();
    assert.equal(json.error.code, 'overloaded');
    assert.equal(json.error.type, 'overloaded_error');
    // openai's own retries get through once a place is free.
    const client = new OpenAI({ baseURL: s.v1, apiKey: 'x' });
    const call = client.chat.completions.create({ model: 'default', ...norway });
    await sleep(100);
    s.worker.kill('SIGCONT');
    assert.equal((await call).choices[0].message.content, answer);
    controller.abort();
  } finally {
    await s.stop();
  }
});

test('W54 padding of slow JSON', async () => {
  const fast = await chat(server, norway);
  assert.ok(fast.headers['content-length'], 'known length');
  const paused = pause(server, 2200);
  const slow = await rawPost(server, '/v1/chat/completions', norway);
  assert.equal(slow.headers['transfer-encoding'], 'chunked');
  assert.match(slow.body.toString('latin1'), /^ +\{/);
  assert.equal(JSON.parse(slow.body).choices[0].message.content, answer);
  await paused;
  const s = await startServer({ restart: false, set: { 'worker.resume_deadline': '2 s', 'server.json_pad_after': '1 s' }, allow: [/./] });
  try {
    s.worker.kill('SIGSTOP');
    const broken = rawPost(s, '/v1/chat/completions', norway);
    const client = new OpenAI({ baseURL: s.v1, apiKey: 'x', maxRetries: 0 });
    const raised = assert.rejects(client.chat.completions.create({ model: 'default', ...norway }));
    await sleep(1500);
    s.worker.kill('SIGKILL');
    const r = await broken;
    assert.equal(r.status, 200);
    assert.equal(r.complete, false, 'no zero chunk');
    assert.equal(r.ended, true);
    await raised;
  } finally {
    await s.stop();
  }
});

test('W55 drain', async () => {
  const s = await startServer({ restart: false });
  try {
    let other;
    const r = await rawPost(s, '/v1/chat/completions', { ...long, max_tokens: 1500, stream: true }, {
      onData: (d) => { if (d.includes('"content":"')) other ??= whileDraining(s); } });
    const e = events(r.body);
    assert.equal(e.done, 1);
    assert.equal(assemble(e.list).finish, 'length', 'the running answer finished');
    await s.gateway.exited;
    assert.deepEqual(s.gateway.status, { code: 0, signal: null });
    assert.ok([503, 'closed'].includes(await other), `a connection from before, while draining: ${await other}`);
    await assert.rejects(fetch(`${s.base}/livez`), 'nobody listens any more');
  } finally {
    await s.stop();
  }
});

// Opens a connection, sends SIGTERM, asks /readyz on it: its status, or 'closed' if it was idle and went first.
function whileDraining(s) {
  return new Promise((resolve) => {
    const c = createConnection(s.socket);
    let all = Buffer.alloc(0), asked = false;
    c.on('error', () => resolve('closed'));
    c.on('close', () => resolve('closed'));
    c.on('connect', () => c.write(httpBytes('GET', '/livez')));
    c.on('data', (d) => {
      all = Buffer.concat([all, d]);
      const r = parseResponse(all);
      if (!r.complete) return;
      if (asked) {
        c.destroy();
        resolve(r.status);
        return;
      }
      asked = true;
      all = Buffer.alloc(0);
      s.gateway.child.kill('SIGTERM');
      s.until('it drains', () => s.gateway.lines.some((l) => l.includes('draining')), 3000).then(() => c.write(httpBytes('GET', '/readyz')), () => resolve('no draining in the log'));
    });
  });
}
