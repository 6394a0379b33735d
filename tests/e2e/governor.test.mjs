// What the GPU's memory and heat lead to, from the readings to headers, metrics and bits. GPU and NVML are stand-ins; a
// test writes what the latter reads.
import { test, before, after } from 'node:test';
import assert from 'node:assert/strict';
import { execFileSync } from 'node:child_process';
import { copyFileSync, mkdirSync, renameSync, writeFileSync } from 'node:fs';
import path from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { bin, slow, tinymoe } from './clients/server.mjs';
import { standIn, status } from './stand_in.mjs';

const MIB = 2 ** 20;
let gpu, model, readings, env, expected;

// The device has 1,000 MiB: a point is 10.
function read({ free = 400, temperature = 60 }) {
  writeFileSync(`${readings}.new`, `total=1000 free=${free} temperature=${temperature} power=115000 use=98\n`);
  renameSync(`${readings}.new`, readings);
}

before(() => {
  gpu = standIn();
  model = path.join(gpu.root, 'm.gguf'); // its experts are 108 MiB: three chunks and a rest
  execFileSync(path.join(bin, 'mkmodel'), ['--layers', '4', '--hidden', '512', '--experts', '32', '--ff', '1024', '--top-k', '4',
    '--donor', tinymoe, '--out', model], { stdio: 'ignore' });
  readings = path.join(gpu.root, 'readings');
  env = { LD_LIBRARY_PATH: `${gpu.nvml}:${process.env.LD_LIBRARY_PATH ?? ''}`, ISLET_FAKE_NVML: readings };
});
after(() => gpu.done());

const post = (base, max_tokens) => fetch(`${base}/v1/completions`, {
  method: 'POST',
  headers: { 'content-type': 'application/json' },
  body: JSON.stringify({ prompt: 'Once upon a time', max_tokens, temperature: 0.8, seed: 5, logprobs: 1, ignore_eos: true }),
});

async function answer(response) {
  const body = await response.json();
  assert.equal(response.status, 200, JSON.stringify(body));
  return {
    text: JSON.stringify([body.choices[0].logprobs.tokens, body.choices[0].logprobs.token_logprobs]),
    celsius: response.headers.get('x-nvidia-temp'),
    degraded: response.headers.get('x-islet-degraded'),
  };
}

async function ask(base, max_tokens = 12) {
  return answer(await post(base, max_tokens));
}

// The worker's figures once `wanted` is true of them.
async function until(base, wanted) {
  for (const end = Date.now() + 60000 * slow; ; await sleep(100)) {
    const { worker } = await status(base);
    if (wanted(worker)) return worker;
    assert.ok(Date.now() < end, JSON.stringify(worker));
  }
}

test('without a GPU no temperature is told', async () => {
  read({});
  const { result } = await gpu.up(model, env, ['compute.gpu=off'], async (base) => [await ask(base), await ask(base, 40)]);
  expected = { 12: result[0].text, 40: result[1].text };
  assert.equal(result[0].celsius, null);
});

test('header, metrics and ps tell the temperature', async () => {
  read({});
  await gpu.up(model, env, [], async (base, log, run) => {
    await until(base, (w) => w.gpu_temperature_celsius === 60);
    const a = await ask(base);
    assert.equal(a.text, expected[12]);
    assert.deepEqual([a.celsius, a.degraded], ['60', null]);
    for (const [url, status] of [['/v1/models', 200], ['/nothing', 404], ['/v1/completions', 405]]) {
      const response = await fetch(base + url);
      assert.deepEqual([response.status, response.headers.get('x-nvidia-temp')], [status, '60']);
    }
    const metrics = await (await fetch(`${base}/metrics`)).text();
    assert.match(metrics, /^islet_worker_gpu_temperature_celsius 60$/m);
    assert.match(metrics, /^islet_worker_gpu_power_milliwatts 115000$/m);
    assert.match(metrics, new RegExp(`^islet_worker_gpu_memory_used_bytes ${600 * MIB}$`, 'm'));
    const ps = execFileSync(path.join(gpu.root, 'bin/islet'), ['ps'], { env: { ...process.env, XDG_RUNTIME_DIR: run }, encoding: 'utf8' });
    assert.match(ps, /600\.00 MiB of 1000\.00 MiB in use by all programs; 60 C, 115 W, busy 98 %/);
  });
});

test('heat: two sequences a step until it is cool again', async () => {
  read({ temperature: 86 });
  await gpu.up(model, env, [], async (base) => {
    await until(base, (w) => w.governor_batch_limit === 2);
    const answers = await Promise.all([1, 2, 3, 4].map(() => ask(base)));
    for (const a of answers) assert.equal(a.text, expected[12]);
    assert.equal(answers[0].celsius, '86');
    assert.match(answers[0].degraded, /^the GPU was over 85 C: 2 sequences a step until below 80 C$/);
    read({ temperature: 80 });
    await until(base, (w) => w.gpu_temperature_celsius === 80 && w.governor_batch_limit === 2);
    read({ temperature: 79 });
    await until(base, (w) => w.governor_batch_limit === 0);
    assert.equal((await ask(base)).degraded, null);
  });
});

test('memory: chunks of islands are given back, admission pauses, and the bits stay', async () => {
  read({});
  await gpu.up(model, env, [], async (base, log) => {
    const all = await until(base, (w) => w.experts_in_vram === w.experts_total);
    assert.equal(all.vram_given_back_bytes, 0);
    read({ free: 49 }); // 951 are in use, 940 should be
    await until(base, (w) => w.governor_paused === 1);
    const refused = await post(base, 12);
    assert.equal(refused.status, 503);
    assert.ok(Number(refused.headers.get('retry-after')) >= 1);
    assert.equal((await refused.json()).error.code, 'overloaded');
    assert.equal((await fetch(`${base}/readyz`)).status, 503);
    read({ free: 70 });
    const less = await until(base, (w) => w.governor_paused === 0);
    assert.ok(less.vram_given_back_bytes >= 32 * MIB, log());
    assert.equal(less.vram_given_back_bytes % (32 * MIB), 0);
    assert.ok(less.experts_in_vram < less.experts_total);
    const a = await ask(base);
    assert.equal(a.text, expected[12]);
    assert.match(a.degraded, /of 96\.00 MiB of islands given back to other programs$/);
    assert.match(log(), /governor islands_given_back/);
  });
});

test('memory that runs out: the CPU goes on alone in the middle of an answer', async () => {
  read({});
  const { log } = await gpu.up(model, env, ['memory.vram_budget=300 MiB'], async (base) => {
    await until(base, (w) => w.gpu_memory_total_bytes === 1000 * MIB);
    const running = post(base, 40);
    await until(base, (w) => w.sequences_running === 1);
    read({ free: 1 });
    assert.equal((await answer(await running)).text, expected[40]);
    await until(base, (w) => w.vram_budget_bytes === 0 && w.governor_paused === 0);
    const a = await ask(base);
    assert.deepEqual([a.text, a.celsius], [expected[12], null]);
    assert.match(a.degraded, /^other programs fill the GPU's memory: the CPU computes alone$/);
  });
  assert.match(log(), /governor gpu_given_up/);
});

test('no NVML: said once, and the GPU tells its memory itself', async () => {
  const other = path.join(gpu.root, 'other');
  mkdirSync(other);
  copyFileSync(path.join(bin, '../tests/fake-empty.so'), path.join(other, 'libnvidia-ml.so.1'));
  const { log } = await gpu.up(model, { LD_LIBRARY_PATH: other }, [], async (base, said) => {
    await until(base, (w) => w.gpu_memory_total_bytes === 4096 * MIB && w.gpu_memory_used_bytes > 0);
    const a = await ask(base);
    assert.deepEqual([a.text, a.celsius, a.degraded], [expected[12], null, null]);
    for (const end = Date.now() + 20000 * slow; !/governor no_sensors/.test(said()) && Date.now() < end; ) await sleep(100);
  });
  assert.equal(log().match(/governor no_sensors/g)?.length, 1, log());
});
