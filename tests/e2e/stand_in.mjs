// `islet up` with a stand-in of a GPU: of islet-cuda.so, found beside copies of the programs as the real one is, and of
// NVML, found as a system's library.
import assert from 'node:assert/strict';
import { spawn } from 'node:child_process';
import { copyFileSync, mkdirSync, mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import path from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { bin, freePort, slow } from './clients/server.mjs';

export function standIn() {
  const root = mkdtempSync(path.join(tmpdir(), 'islet-gpu-'));
  mkdirSync(path.join(root, 'bin'));
  mkdirSync(path.join(root, 'lib'));
  mkdirSync(path.join(root, 'nvml'));
  for (const name of ['islet', 'isletd', 'islet-gateway']) copyFileSync(path.join(bin, name), path.join(root, 'bin', name));
  copyFileSync(path.join(bin, '../tests/fake-cuda.so'), path.join(root, 'lib/islet-cuda.so'));
  copyFileSync(path.join(bin, '../tests/fake-nvml.so'), path.join(root, 'nvml/libnvidia-ml.so.1'));

  // Runs `islet up` while `use(base URL, log)` does; gives its result and the log.
  async function up(model, env, sets, use) {
    const port = await freePort();
    const run = mkdtempSync(path.join(root, 'run-'));
    const args = ['up', '--model', model, '--set', `server.listen=127.0.0.1:${port}`, ...sets.flatMap((s) => ['--set', s])];
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
      return { result: await use(`http://127.0.0.1:${port}`, () => log, run), log: () => log };
    } finally {
      child.kill('SIGTERM');
      await ended;
    }
  }

  return { root, up, nvml: path.join(root, 'nvml'), done: () => rmSync(root, { recursive: true, force: true }) };
}

export const status = async (base) => (await fetch(`${base}/status`)).json();
