// A GPU beside the CPU, from the settings to the answer, and what becomes of an answer when it fails. The GPU is a
// stand-in of islet-cuda.so, found beside copies of the programs as the real one is.
import { test, before, after } from 'node:test';
import assert from 'node:assert/strict';
import { spawn } from 'node:child_process';
import { copyFileSync, mkdirSync, mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import path from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { bin, freePort, slow, tinymoe } from './clients/server.mjs';

let root;
before(() => {
  root = mkdtempSync(path.join(tmpdir(), 'islet-gpu-'));
  mkdirSync(path.join(root, 'bin'));
  mkdirSync(path.join(root, 'lib'));
  for (const name of ['islet', 'isletd', 'islet-gateway']) copyFileSync(path.join(bin, name), path.join(root, 'bin', name));
  copyFileSync(path.join(bin, '../tests/fake-cuda.so'), path.join(root, 'lib/islet-cuda.so'));
});
after(() => rmSync(root, { recursive: true, force: true }));

// Runs `islet up` while `use(base URL)` does; gives its result and the log.
async function up(env, sets, use) {
  const port = await freePort();
  const run = mkdtempSync(path.join(root, 'run-'));
  const args = ['up', '--model', tinymoe, '--set', `server.listen=127.0.0.1:${port}`, ...sets.flatMap((s) => ['--set', s])];
  const child = spawn(path.join(root, 'bin/islet'), args, {
    env: { ...process.env, ...env, XDG_RUNTIME_DIR: run },
    stdio: ['ignore', 'pipe', 'pipe'],
  });
  let log = '';
  const ended = new Promise((resolve) => child.on('exit', resolve));
  for (const stream of [child.stdout, child.stderr]) stream.setEncoding('utf8').on('data', (text) => (log += text));
  try {
    for (const until = Date.now() + 30000 * slow; !log.includes('ready: '); await sleep(50))
      assert.ok(Date.now() < until && child.exitCode === null, log);
    return { result: await use(`http://127.0.0.1:${port}`), log: () => log };
  } finally {
    child.kill('SIGTERM');
    await ended;
  }
}

async function ask(base) {
  const response = await fetch(`${base}/v1/chat/completions`, {
    method: 'POST',
    headers: { 'content-type': 'application/json' },
    body: JSON.stringify({
      messages: [{ role: 'user', content: 'Tell me a long story.' }],
      max_tokens: 100,
      temperature: 0.8,
      seed: 5,
      logprobs: true,
    }),
  });
  assert.equal(response.status, 200);
  const { choices } = await response.json();
  const degraded = response.headers.get('x-islet-degraded');
  return { text: JSON.stringify(choices[0].logprobs.content.map((t) => [t.token, t.logprob])), degraded };
}

const status = async (base) => (await fetch(`${base}/status`)).json();

let expected;
test('compute.gpu = off: the CPU alone answers', async () => {
  const { result } = await up({}, ['compute.gpu=off'], async (base) => [await ask(base), await status(base)]);
  expected = result[0].text;
  assert.equal(result[1].worker.vram_budget_bytes, 0);
  assert.equal(result[0].degraded, null);
});

for (const sets of [[], ['memory.vram_budget=150 MiB', 'memory.kv_budget=128 MiB'], ['memory.ram_budget=24 MiB']])
  test(`a GPU gives the same bits, ${sets.join(', ') || 'all by default'}`, async () => {
    const { result } = await up({}, sets, async (base) => [await ask(base), await status(base)]);
    const { worker } = result[1];
    assert.equal(result[0].text, expected);
    assert.equal(result[0].degraded, null);
    assert.match(worker.backend, /^stand-in\+/);
    assert.ok(worker.vram_budget_bytes > 0 && worker.expert_hits_vram_total > 0);
    if (sets[0]?.startsWith('memory.vram_budget')) assert.ok(worker.vram_budget_bytes <= 150 << 20);
  });

test('a GPU without room is not used, and the answer says why', async () => {
  const { result } = await up({ ISLET_FAKE_CUDA_MIB: '64' }, [], ask);
  assert.equal(result.text, expected);
  assert.match(result.degraded, /memory\.vram_budget .* is the least that works/);
});

// Fails at ever earlier calls until it is towards the end of an answer: the worker that resumes it fails at the same
// call, and so needs fewer.
async function failing(error, wanted) {
  for (let nth = 4000; nth > 500; nth = Math.round(nth * 0.96)) {
    const { result, log } = await up({ ISLET_GPU_FAULT: `${nth}:${error}` }, ['compute.gpu=auto'], ask);
    assert.equal(result.text, expected);
    if (wanted.test(log())) return { result, log: log() };
  }
  assert.fail('no call failed in an answer');
}

test('a GPU that fails in an answer: the CPU goes on with the same bits', async () => {
  const { result, log } = await failing(46, /gpu_failed/);
  assert.match(result.degraded, /CUDA error 46/);
  assert.match(log, /action="continuing: the CPU computes all of it again"/);
});

test('a GPU that is lost: the worker ends with 70, the next one resumes the answer', async () => {
  const { log } = await failing(700, /gpu_failed/);
  assert.match(log, /worker ended with status 70/);
  assert.match(log, /request resumed/);
});
