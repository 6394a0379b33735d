// W70: 200 clients with mixed cases for so many seconds; descriptors, memory and queue return to where they began.
import { readdirSync, readFileSync } from 'node:fs';
import { createConnection } from 'node:net';
import { ask, assert, chat, httpBytes, raw, rawPost, sanitised, sleep, startServer, stream, tinymoe } from './clients/server.mjs';

const seconds = Number(process.argv[2] ?? 30);
const CLIENTS = 200;
const server = await startServer({ model: process.env.MODEL || tinymoe, set: { 'server.queue': '256', 'memory.kv_budget': '24 MiB', 'log.level': 'warn' } });

const fds = (pid) => readdirSync(`/proc/${pid}/fd`).length;
const rssKiB = (pid) => Number(/VmRSS:\s+(\d+)/.exec(readFileSync(`/proc/${pid}/status`, 'utf8'))[1]);
const measure = async () => {
  const s = await server.status();
  return { gatewayFds: fds(server.gateway.pid), workerFds: fds(server.worker.pid), gatewayKiB: rssKiB(server.gateway.pid), workerKiB: rssKiB(server.worker.pid),
    kvUsed: s.worker.kv_pages_used, kvFreeKiB: (s.worker.kv_pages_total - s.worker.kv_pages_cached) * s.worker.kv_page_bytes / 1024, running: s.worker.sequences_running, waiting: s.worker.sequences_waiting };
};

let state = 20261130;
const random = (n) => { state = (Math.imul(state, 1664525) + 1013904223) >>> 0; return (state >>> 8) % n; };
const questions = ['What is the capital of Norway?', 'What is 64 - 27?', 'Hello!', 'What colour is a lemon?', 'Spell the word bridge.', 'Tell me a story.', 'How do I make pancakes?'];
const counts = new Map();
const count = (what) => counts.set(what, (counts.get(what) ?? 0) + 1);
const okOrBusy = (r, what) => { assert.ok(r.status === 200 || r.status === 503, `${what}: ${r.status} ${r.body}`); count(`${what} ${r.status}`); };

// Connects, sends, and leaves after ms, by a close or a reset.
const leave = (bytes, ms) => new Promise((resolve) => {
  const c = createConnection(server.port, '127.0.0.1', () => { c.write(bytes); setTimeout(() => { if (random(2)) c.resetAndDestroy(); else c.destroy(); }, ms); });
  c.on('error', () => {});
  c.on('close', resolve);
});

const cases = [
  async () => { const r = await chat(server, ask(questions[random(7)], { max_tokens: 1 + random(24) })); okOrBusy(r, 'chat'); },
  async () => { const r = await stream(server, ask(questions[random(7)], { max_tokens: 1 + random(24), temperature: 1, seed: random(1000), n: 1 + random(2) })); okOrBusy(r, 'stream'); if (r.status === 200) assert.equal(r.done, 1); },
  async () => { okOrBusy(await rawPost(server, '/v1/completions', { prompt: ['The sun', 'The moon'], max_tokens: 4, logprobs: 2 }), 'completions'); },
  async () => { await leave(httpBytes('POST', '/v1/chat/completions', ask('Tell me a story.', { stream: true, max_tokens: 400 })), random(300)); count('left a stream'); },
  async () => { await leave(httpBytes('POST', '/v1/chat/completions', ask('Tell me a story.', { max_tokens: 400 })), random(300)); count('left JSON'); },
  async () => { await leave(httpBytes('POST', '/v1/chat/completions', ask('Hello!')).subarray(0, 60 + random(120)), random(50)); count('left half a request'); },
  async () => { await leave(httpBytes('POST', '/v1/completions', { prompt: Array(300).fill(310), echo: true, logprobs: 20, max_tokens: 2 }), random(400)); count('left an echo'); },
  async () => { okOrBusy(await rawPost(server, '/v1/completions', { prompt: Array(300).fill(311), echo: true, logprobs: 20, max_tokens: 2, stream: random(2) === 1 }), 'echo'); },
  async () => { const r = await rawPost(server, '/v1/chat/completions', '{"messages":'); assert.equal(r.status, 400); count('bad JSON'); },
  async () => { const r = await raw(server, 'GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n'); assert.equal(r.status, 400); count('bad HTTP'); },
  async () => { for (const p of ['/livez', '/readyz', '/status', '/metrics', '/v1/models']) assert.equal((await raw(server, httpBytes('GET', p))).status, 200); count('health'); },
  async () => { const r = await rawPost(server, '/tokenize', { content: 'ab '.repeat(random(40000)) }); assert.equal(r.status, 200); count('tokenize'); },
];

// Warm up: every size that memory will take is taken once.
const round = (n) => Promise.all(Array.from({ length: n }, (_, i) => cases[i % cases.length]()));
for (let i = 0; i < 3; i++) await round(CLIENTS);
await server.idle(30000);
await sleep(300);
const before = await measure();
const expected = (await chat(server, ask(questions[0]))).content;

const end = Date.now() + seconds * 1000;
const failures = [];
await Promise.all(Array.from({ length: CLIENTS }, async (_, i) => {
  while (Date.now() < end && failures.length === 0) {
    try {
      await cases[(i + random(cases.length)) % cases.length]();
    } catch (e) {
      failures.push(e);
    }
    await sleep(random(20));
  }
}));
if (failures.length) {
  console.error(failures[0]);
  console.error(server.logText());
}
await server.idle(30000);
await server.until('the connections are closed', async () => fds(server.gateway.pid) <= before.gatewayFds + 2, 5000).catch(() => {});
const after = await measure();
const again = (await chat(server, ask(questions[0]))).content;
const faults = [];
const check = (what, ok) => { if (!ok) faults.push(what); };
check('a case failed', failures.length === 0);
check('the answer changed', again === expected);
check(`gateway: ${before.gatewayFds} -> ${after.gatewayFds} descriptors`, after.gatewayFds <= before.gatewayFds + 2);
check(`worker: ${before.workerFds} -> ${after.workerFds} descriptors`, after.workerFds <= before.workerFds);
// A sanitiser keeps freed blocks and shadows of all; there the leak check at the end looks after memory.
if (!sanitised) check(`gateway: ${before.gatewayKiB} -> ${after.gatewayKiB} KiB`, after.gatewayKiB <= before.gatewayKiB * 1.25 + 4096);
// KV pages become resident when they are first used.
if (!sanitised) check(`worker: ${before.workerKiB} -> ${after.workerKiB} KiB`, after.workerKiB <= before.workerKiB + before.kvFreeKiB + 4096);
check('KV pages or sequences are left', after.kvUsed === 0 && after.running === 0 && after.waiting === 0);
check('the worker died', server.worker.starts === 1);
console.log(`soak: ${seconds} s, ${[...counts.values()].reduce((a, b) => a + b, 0)} cases: ${[...counts].sort().map(([k, v]) => `${k} ${v}`).join(', ')}`);
console.log(`soak: gateway ${before.gatewayKiB} -> ${after.gatewayKiB} KiB, ${before.gatewayFds} -> ${after.gatewayFds} fds; worker ${before.workerKiB} -> ${after.workerKiB} KiB, ${before.workerFds} -> ${after.workerFds} fds`);
await server.stop().catch((e) => faults.push(e.message));
for (const f of faults) console.log(`  FAIL  soak: ${f}`);
console.log(faults.length ? '0 passed, 1 failed' : '1 passed, 0 failed');
process.exit(faults.length ? 1 : 0);
