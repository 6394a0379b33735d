// A GPU beside the CPU, from the settings to the answer, and what becomes of an answer when it fails. The GPU is a
// stand-in.
import { test, before, after } from 'node:test';
import assert from 'node:assert/strict';
import { execFileSync } from 'node:child_process';
import { copyFileSync, rmSync, writeFileSync } from 'node:fs';
import path from 'node:path';
import { bin, tinymoe } from './clients/server.mjs';
import { standIn, status } from './stand_in.mjs';

let gpu;
before(() => (gpu = standIn()));
after(() => gpu.done());
const up = (env, sets, use) => gpu.up(tinymoe, env, sets, use);
const islet = (run, ...args) =>
  execFileSync(path.join(gpu.root, 'bin/islet'), args, { env: { ...process.env, XDG_RUNTIME_DIR: run }, encoding: 'utf8' });
const planned = (env) =>
  JSON.parse(execFileSync(path.join(gpu.root, 'bin/isletd'), ['--plan', '--json', '--set', `model.path=${tinymoe}`], {
    env: { ...process.env, ...env },
    encoding: 'utf8',
    stdio: ['ignore', 'pipe', 'ignore'],
  }));

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

test('a GPU without room is not used; answer, ps and plan say why', async () => {
  const why = /memory\.vram_budget .* is the least that works/;
  const env = { ISLET_FAKE_CUDA_MIB: '64' };
  const { result } = await up(env, [], async (base, log, run) => [await ask(base), islet(run, 'ps')]);
  assert.equal(result[0].text, expected);
  assert.match(result[0].degraded, why);
  assert.match(result[1], /^degraded +memory\.vram_budget/m);
  const { gpu: card, gpu_refusal } = planned(env);
  assert.equal(card, null);
  assert.match(gpu_refusal, why);
});

test('the least budget that a refusal names is enough', async () => {
  const tell = (sets) => up({}, ['memory.vram_budget=64 MiB', ...sets], async (base) => (await ask(base)).degraded);
  const { result } = await tell(['batch.prefill_chunk=4096']);
  const least = / ([0-9.]+ [MG]iB) is the least that works/.exec(result)[1];
  const again = await up({}, ['batch.prefill_chunk=4096', `memory.vram_budget=${least}`], async (base) => (await ask(base)).degraded);
  assert.equal(again.result, null);
});

test('an islet-cuda.so that cannot be used: the CPU answers, and all say why', async () => {
  const so = path.join(gpu.root, 'lib/islet-cuda.so');
  const put = { other: () => copyFileSync(path.join(bin, '../tests/fake-other.so'), so), text: () => writeFileSync(so, 'text') };
  try {
    for (const [name, why] of [['other', /belongs to another build: version/], ['text', /cannot be loaded/]]) {
      rmSync(so);
      put[name]();
      const { result, log } = await up({}, [], async (base, log, run) => [await ask(base), islet(run, 'ps')]);
      assert.equal(result[0].text, expected);
      assert.match(result[0].degraded, why);
      assert.match(result[1].match(/^degraded +(.*)$/m)[1], why);
      assert.match(log(), /warn engine no_gpu/);
      assert.match(planned({}).gpu_refusal, why);
    }
    rmSync(so); // a build without CUDA is as good as it can be
    const { result } = await up({}, [], async (base, log, run) => [await ask(base), islet(run, 'ps')]);
    assert.deepEqual([result[0].text, result[0].degraded], [expected, null]);
    assert.doesNotMatch(result[1], /^degraded/m);
    assert.match(planned({}).gpu_refusal, /no islet-cuda\.so/);
  } finally {
    copyFileSync(path.join(bin, '../tests/fake-cuda.so'), so);
  }
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

test('a GPU that every worker loses in the same answer: the CPU answers in the end', async () => {
  for (let nth = 2600; nth > 500; nth = Math.round(nth * 0.9)) {
    const { result, log } = await up({ ISLET_GPU_FAULT: `${nth}:719` }, [], ask);
    assert.equal(result.text, expected);
    if ((log().match(/worker ended with status 70/g) ?? []).length < 2) continue;
    assert.match(result.degraded, /lost again and again/);
    assert.match(log(), /warn engine gpu_rests/);
    return;
  }
  assert.fail('it was never lost twice');
});
