// W47-W55: streams, waiting, and the end of things.
import test, { after, afterEach, before } from 'node:test';
import { createConnection } from 'node:net';
import { ChatOpenAI, createOpenAICompatible, generateText, OpenAI } from '../clients/official.mjs';
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
  const r = await rawPost(server, '/v1/chat/completions', { ...norway, stream: true, sse_ping_interval: -1, stream_options: { include_usage: true } });
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
  const json = await chat(server, norway);
  assert.match(list[0].id, /^chatcmpl-[A-Za-z0-9]{24}$/);
  list.forEach((e, i) => {
    assert.equal(e.object, 'chat.completion.chunk');
    assert.equal(e.model, json.json.model);
    assert.equal(e.system_fingerprint, json.json.system_fingerprint);
    const at = list.length - i; // 1: the usage, 2: the finish
    assert.equal(Object.keys(e).join(' '), `id object created model system_fingerprint choices usage${at === 2 ? ' timings' : ''}`);
    if (at > 1) assert.equal(Object.keys(e.choices[0]).join(' '), `index delta logprobs finish_reason${at === 2 ? ' stop_reason' : ''}`);
    if (at > 1) assert.deepEqual([e.choices.length, e.choices[0].index, e.choices[0].logprobs], [1, 0, null]);
    if (at > 2) assert.equal(e.choices[0].finish_reason, null);
  });
  const { prompt_tokens, completion_tokens, total_tokens } = list.at(-1).usage;
  assert.deepEqual([prompt_tokens, completion_tokens, total_tokens], ['prompt_tokens', 'completion_tokens', 'total_tokens'].map((k) => json.json.usage[k]));
  assert.deepEqual(Object.keys(list.at(-1).usage), Object.keys(json.json.usage));
  assert.deepEqual(Object.keys(list.at(-2).timings), Object.keys(json.json.timings));
  // The role comes together with the first text; events are chunks; one chunk of no length, and nothing behind it.
  assert.match(r.chunks[0].toString(), /^data: .*"role":"assistant","content":"".*\n\ndata: .*"delta":{"content":"[^"]/);
  for (const c of r.chunks) assert.ok(c.toString().startsWith('data: ') && c.toString().endsWith('\n\n'));
  assert.ok(r.raw.toString().endsWith('data: [DONE]\n\n\r\n0\r\n\r\n'));
  assert.equal(r.raw.toString().split('\r\n0\r\n\r\n').length, 2);
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

test('timings_per_token and return_tokens', async () => {
  const s = await stream(server, { ...norway, timings_per_token: true, return_tokens: true, stream_options: { include_usage: true } });
  for (const e of s.list) assert.ok(e.timings.predicted_n >= 0, JSON.stringify(e));
  const json = await chat(server, { ...norway, return_tokens: true });
  assert.deepEqual(s.tokens, json.json.choices[0].tokens);
  assert.equal(s.tokens.length, json.json.usage.completion_tokens - 1);
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

test('W49 behind a long request headers come at once, and comments until it is its turn', async () => {
  const s = await startServer({ set: { 'batch.max_sequences': '1' } });
  try {
    const first = s.connect();
    first.on('error', () => {}).resume().write(httpBytes('POST', '/v1/chat/completions', { ...long, max_tokens: 1900, stream: true }));
    await s.until('it runs', async () => (await s.status()).gateway.running === 1);
    const start = performance.now();
    let headAt, free;
    const r = await rawPost(s, '/v1/chat/completions', { ...norway, stream: true, sse_ping_interval: 1 }, {
      onData: (d, c, all) => {
        headAt ??= performance.now() - start;
        if (!free && all.toString('latin1').endsWith('\r\n\r\n')) s.worker.kill('SIGSTOP'); // or it would be over too soon
        if (!free && all.includes(':\n\n')) { free = true; first.destroy(); s.worker.kill('SIGCONT'); }
      } });
    assert.ok(headAt < 1000 * slow, `head after ${headAt} ms`);
    const e = events(r.body);
    assert.ok(free && e.comments >= 1);
    assert.equal(assemble(e.list).content, answer);
  } finally {
    await s.stop();
  }
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
    assert.equal(all.usage, null);
    assert.deepEqual(Object.keys(e.list.at(-1)), ['error']);
    assert.deepEqual(Object.keys(all.error), ['message', 'type', 'param', 'code']);
    assert.equal(all.error.type, 'server_error');
    assert.ok(r.raw.toString().endsWith('data: [DONE]\n\n\r\n0\r\n\r\n'));
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

test('W51 while no worker is there: comments, then the undisturbed text', async () => {
  const story = ask('How do I make pancakes?', { temperature: 0, sse_ping_interval: 1, stream_options: { include_usage: true } });
  const plain = await stream(server, story);
  const s = await startServer({ restart: false, allow: [/./] });
  try {
    let killed, at = 0, quiet = 0;
    const r = await rawPost(s, '/v1/chat/completions', { ...story, stream: true }, {
      onData: (d, c, all) => {
        if (!killed && all.includes('"content":"')) killed = s.worker.kill().then(() => { at = all.length; });
        if (at && d.includes(':\n\n') && !d.includes('data:') && ++quiet === 2) s.worker.start();
      } });
    const e = events(r.body);
    const got = assemble(e.list);
    assert.ok(e.comments >= 2, `${e.comments} comments`);
    assert.equal(got.content, plain.content);
    assert.equal(got.finish, plain.finish);
    assert.equal(got.usage.islet.resumed, 1);
    assert.equal(got.usage.completion_tokens, plain.usage.completion_tokens);
  } finally {
    await s.stop();
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
    // The tokens that make it have bytes that are no text each, and ride with it.
    const json = await chat(s, { ...ask('Hi'), logprobs: true, reasoning_format: 'none' });
    const pieces = json.json.choices[0].logprobs.content;
    assert.equal(Buffer.from(pieces.flatMap((t) => t.bytes)).toString(), json.content);
    assert.ok(pieces.filter((t) => t.token.includes('\ufffd')).length >= 2, 'tokens of half characters');
    for (const t of pieces) assert.equal(t.token, new TextDecoder().decode(Buffer.from(t.bytes)));
    const streamed = await stream(s, { ...ask('Hi'), logprobs: true, reasoning_format: 'none' });
    assert.deepEqual(streamed.logprobs, pieces);
    const split = await stream(s, { ...ask('Hi'), logprobs: true, return_tokens: true });
    assert.deepEqual(split.logprobs, pieces, 'thoughts have theirs');
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
    const raised = Promise.all([
      assert.rejects(client.chat.completions.create({ model: 'default', ...norway })),
      assert.rejects(generateText({ model: createOpenAICompatible({ name: 'islet', baseURL: s.v1 })('default'), prompt: 'Hi', maxRetries: 0 })),
      assert.rejects(new ChatOpenAI({ model: 'default', apiKey: 'x', maxRetries: 0, configuration: { baseURL: s.v1 } }).invoke('Hi')),
    ]);
    await sleep(1500);
    s.worker.kill('SIGKILL');
    const r = await broken;
    assert.equal(r.status, 200);
    assert.equal(r.complete, false, 'no zero chunk');
    assert.equal(r.body.toString(), ' ', 'nothing but the padding');
    assert.equal(r.ended, true);
    await raised;
  } finally {
    await s.stop();
  }
});

test('W55 drain', async () => {
  const s = await startServer({ restart: false, set: { 'server.drain_deadline': `${120 * slow} s` } });
  try {
    let other;
    const r = await rawPost(s, '/v1/chat/completions', { ...long, max_tokens: 1500, stream: true }, {
      onData: (d) => { if (d.includes('"content":"')) other ??= whileDraining(s); } });
    const e = events(r.body);
    assert.equal(e.done, 1);
    assert.equal(assemble(e.list).finish, 'length', 'the running answer finished');
    await s.gateway.exited;
    assert.deepEqual(s.gateway.status, { code: 0, signal: null });
    const [ready, asked, idle] = await other;
    assert.equal(ready.status, 503);
    assert.equal(JSON.parse(ready.body).status, 'draining');
    assert.equal(asked.status, 503);
    assert.deepEqual([JSON.parse(asked.body).error.code, JSON.parse(asked.body).error.type], ['overloaded', 'overloaded_error']);
    for (const x of [ready, asked]) {
      assert.match(x.headers['retry-after'], /^([1-9]|[12][0-9]|30)$/);
      assert.equal(x.headers.connection, 'close');
    }
    assert.equal(idle, 'closed', 'an idle connection goes first');
    await assert.rejects(fetch(`${s.base}/livez`), 'nobody listens any more');
  } finally {
    await s.stop();
  }
});

test('W55 beyond drain_deadline a stream ends with an error', async () => {
  const s = await startServer({ restart: false, set: { 'server.drain_deadline': '1 s' }, allow: [/./] });
  try {
    let asked = false;
    const r = await rawPost(s, '/v1/chat/completions', { ...long, stream: true }, {
      onData: (d) => {
        if (asked || !d.includes('"content":"')) return;
        asked = true;
        s.worker.kill('SIGSTOP');
        s.gateway.child.kill('SIGTERM');
      } });
    assert.equal(r.complete, true);
    const e = events(r.body);
    assert.equal(e.done, 1);
    const all = assemble(e.list);
    assert.deepEqual([all.error.code, all.error.type, all.finishes], ['overloaded', 'overloaded_error', 0]);
    await s.gateway.exited;
    assert.deepEqual(s.gateway.status, { code: 0, signal: null });
  } finally {
    await s.stop();
  }
});

// Two requests are begun and one connection is idle when SIGTERM comes: what the two are told then, and the end of the third.
async function whileDraining(s) {
  const begin = async (first) => {
    const c = createConnection(s.socket);
    const end = new Promise((resolve) => {
      let all = Buffer.alloc(0);
      c.on('error', () => {}).on('data', (d) => { all = Buffer.concat([all, d]); }).on('close', () => resolve(all.length ? parseResponse(all) : 'closed'));
    });
    await new Promise((resolve) => c.on('connect', resolve));
    c.write(first);
    return { c, end };
  };
  const look = httpBytes('GET', '/readyz'), chatBytes = httpBytes('POST', '/v1/chat/completions', norway);
  const all = [await begin(look.subarray(0, 20)), await begin(chatBytes.subarray(0, 40)), await begin(Buffer.alloc(0))];
  await s.until('all are taken', async () => (await s.metrics()).get('islet_gateway_connections') >= 5);
  s.gateway.child.kill('SIGTERM');
  await s.until('it drains', () => s.gateway.lines.some((l) => l.includes('draining')));
  all[0].c.write(look.subarray(20));
  all[1].c.write(chatBytes.subarray(40));
  return Promise.all(all.map((x) => x.end));
}
