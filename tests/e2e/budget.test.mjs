// memory.ram_budget is hard: a model of several times the budget serves within budget + 64 MiB, page cache included, under
// a memory limit that would kill the worker otherwise.
import assert from 'node:assert/strict';
import { execFile, execFileSync, spawn } from 'node:child_process';
import fs from 'node:fs';
import os from 'node:os';
import path from 'node:path';
import { test } from 'node:test';
import { promisify } from 'node:util';

import { makeLimit, Skip } from '../bench/outofcore_host.mjs';
import { bin, root, sanitised } from './clients/server.mjs';

const MiB = 1024 * 1024;
const budget = 160 * MiB;
const process_ = 64 * MiB; // what the process itself may take, as islet.conf(5) says

function limitOrSkip(t, bytes) {
    try {
        return makeLimit(bytes);
    } catch (e) {
        if (!(e instanceof Skip) && e.code !== 'EACCES' && e.code !== 'EROFS' && e.code !== 'EPERM') throw e;
        t.skip(`no memory limit can be set here: ${e.message}`);
        return undefined;
    }
}

test('a worker stays within its budget under a limit that would kill it', { skip: sanitised && 'shadow memory counts too' }, async (t) => {
    const limit = limitOrSkip(t, budget + process_);
    if (!limit) return;
    const dir = fs.mkdtempSync(path.join(os.tmpdir(), 'islet-budget-'));
    const model = path.join('/var/tmp', `islet-budget-${process.pid}.gguf`);
    let worker;
    try {
        execFileSync(path.join(bin, 'mkmodel'), ['--out', model, '--layers', '8', '--hidden', '1024', '--experts', '64',
            '--ff', '512', '--top-k', '4', '--heads', '8', '--head-dim', '128', '--kv', '2', '--vocab', '4096']);
        assert.ok(fs.statSync(model).size > 2.5 * budget, 'the model is larger than its memory');
        const sets = { 'model.path': model, 'worker.socket': `${dir}/worker.sock`, 'memory.ram_budget': `${budget / MiB} MiB`,
            'memory.kv_budget': '16 MiB', 'batch.prefill_chunk': '64', 'batch.max_sequences': '8' };
        const args = Object.entries(sets).flatMap(([k, v]) => ['--set', `${k}=${v}`]);
        // the shell moves into the group before it becomes isletd, so that every page counts
        worker = spawn('/bin/sh', ['-c', 'echo $$ >"$0" && exec "$@"', limit.procs, path.join(bin, 'isletd'), ...args],
            { stdio: ['ignore', 'ignore', 'pipe'], cwd: root });
        let log = '';
        worker.stderr.on('data', (d) => (log += d));
        const ended = new Promise((resolve) => worker.on('exit', (code, signal) => resolve({ code, signal })));
        const { stdout } = await promisify(execFile)(path.join(bin, 'bench_outofcore'), ['client', `${dir}/worker.sock`,
            '--pid', String(worker.pid), '--model', model, '--prompt', '48', '--tokens', '64', '--clients', '4', '--passes', '2']);
        const passes = stdout.trim().split('\n').map((line) => JSON.parse(line));
        worker.kill('SIGTERM');
        const { code, signal } = await ended;
        const peak = limit.peak();
        t.diagnostic(`peak ${(peak / MiB).toFixed(1)} of ${(budget + process_) / MiB} MiB, slots ${(passes[0].slots_bytes / MiB).toFixed(1)} MiB`);
        assert.deepEqual({ code, signal, kills: limit.kills() }, { code: 0, signal: null, kills: 0 }, log);
        for (const p of passes) assert.ok(p.decode.hits > 0 && p.decode.misses > 0, JSON.stringify(p));
        if (peak !== undefined) assert.ok(peak < budget + process_, `${peak} bytes were in use`);
        assert.ok(passes[0].slots_bytes < budget);
    } finally {
        worker?.kill('SIGKILL');
        fs.rmSync(model, { force: true });
        fs.rmSync(dir, { recursive: true, force: true });
        limit.remove();
    }
});
