// A model file that is cut, written to or replaced while it is served: the requests that need it end with a clear error, and
// status, header and `islet ps` say so.
import assert from 'node:assert/strict';
import { execFileSync } from 'node:child_process';
import fs from 'node:fs';
import os from 'node:os';
import path from 'node:path';
import { after, before, test } from 'node:test';

import { bin, startServer, tinymoe } from './clients/server.mjs';

const MiB = 1024 * 1024;
const body = (seed) => JSON.stringify({ prompt: `Tell me about the number ${seed}.`, max_tokens: 60, temperature: 1, seed, ignore_eos: true });
let dir, server, model;
const ask = async (seed) => {
  const r = await fetch(`http://127.0.0.1:${server.port}/v1/completions`, { method: 'POST', headers: { 'content-type': 'application/json' }, body: body(seed) });
  return { status: r.status, degraded: r.headers.get('x-islet-degraded'), json: await r.json() };
};

before(async () => {
  dir = fs.mkdtempSync(path.join(os.tmpdir(), 'islet-file-'));
  model = path.join(dir, 'model.gguf');
  fs.copyFileSync(tinymoe, model);
  server = await startServer({ model, allow: [/expert_read_failed/],
    set: { 'memory.ram_budget': `${22 * MiB} B`, 'memory.kv_budget': '3 MiB', 'batch.prefill_chunk': '64' } });
});
after(async () => {
  await server?.stop();
  fs.rmSync(dir, { recursive: true, force: true });
});

test('another file in its place changes nothing', async () => {
  const expected = await ask(1);
  assert.equal(expected.status, 200);
  assert.ok(expected.json.usage.islet.expert_misses > 0);
  fs.copyFileSync(tinymoe, `${model}.new`);
  fs.truncateSync(`${model}.new`, MiB);
  fs.renameSync(model, `${model}.old`);
  fs.renameSync(`${model}.new`, model);
  const again = await ask(1);
  assert.equal(again.status, 200);
  assert.doesNotMatch(again.degraded ?? '', /model\.gguf/);
  assert.equal(again.json.choices[0].text, expected.json.choices[0].text);
  fs.renameSync(`${model}.old`, model);
});

test('cut while it is served: requests end with model_error, and all places say why', async () => {
  fs.truncateSync(model, 8 * MiB);
  const r = await ask(2);
  assert.equal(r.status, 500);
  assert.equal(r.json.error.code, 'model_error');
  assert.match(r.json.error.message, /model\.gguf has 8388608 bytes and had \d+ when it was opened; restart with the right file/);
  let status;
  for (const end = Date.now() + 10000; !status?.worker.degraded && Date.now() < end;)
    status = await (await fetch(`http://127.0.0.1:${server.port}/status`)).json();
  assert.match(status.worker.degraded, /model\.gguf has 8388608 bytes/);
  const ps = execFileSync(path.join(bin, 'islet'), ['ps', '--server', `http://127.0.0.1:${server.port}`], { encoding: 'utf8' });
  assert.match(ps, /^degraded  .*model\.gguf has 8388608 bytes/m);
  const metrics = await (await fetch(`http://127.0.0.1:${server.port}/metrics`)).text();
  assert.match(metrics, /^islet_worker_degraded 1$/m);
});
