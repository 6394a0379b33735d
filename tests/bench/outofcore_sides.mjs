// The engines that make bench-outofcore compares: isletd, llama.cpp through peer_llama, and native builds of llama-bench.
// Each measure function takes a case {model, limit, clients, prompt, tokens, passes, seconds} and resolves to
// {name, passes, peak, kills, error}; a pass is {prompt, decode}, each {tokens, seconds, bytes, diskBytes, faults, ...}.
import { execFileSync } from 'node:child_process';
import fs from 'node:fs';

import { start } from './outofcore_host.mjs';

const threads = process.env.THREADS ?? '2';

// Bytes read for a phase. The device counts what others read meanwhile, the process what the page cache of a RAM disk
// gave, so the lower of both; they agree on a quiet machine.
function phaseOf(p) {
    return { ...p, bytes: Math.min(p.disk_bytes || p.process_bytes, p.process_bytes), diskBytes: p.disk_bytes, faults: p.major_faults };
}

const passOf = (line) => {
    const p = JSON.parse(line);
    return { ...p, prompt: phaseOf(p.prompt), decode: phaseOf(p.decode) };
};

function failure(ended, what) {
    if (ended.timedOut) return `${what}: ended after the time limit`;
    if (ended.signal) return `${what}: killed by ${ended.signal}`;
    if (ended.code !== 0) return `${what}: exit code ${ended.code}: ${ended.errors.split('\n').slice(-2).join(' ')}`;
    return undefined;
}

const caseArgs = (c) => ['--prompt', c.prompt, '--tokens', c.tokens, '--clients', c.clients, '--passes', c.passes, '--seconds', c.seconds].map(String);

// ---- isletd -----------------------------------------------------------------------------------------------------

let known; // settings of this isletd
export function hasSetting(bin, key) {
    known ??= execFileSync(`${bin}/isletd`, ['--help-config'], { encoding: 'utf8' });
    return known.includes(key);
}

// c.budget: memory.ram_budget in bytes, or undefined; c.resident: every expert is read first; c.io: ssd.io; c.ids: file for the
// ids; c.trace: file for the routes.
export async function measureOurs(bin, folder, c, group) {
    const runtime = fs.mkdtempSync(`${folder}/run-`);
    const config = `${runtime}/islet.conf`;
    fs.writeFileSync(config, '');
    const sets = [`model.path=${c.model}`, `compute.threads=${threads}`, ...(process.env.SETS ?? 'memory.kv_budget=128 MiB').split(',')];
    if (c.budget) sets.push(`memory.ram_budget=${c.budget} B`);
    if (c.trace) sets.push(`route.trace=${c.trace}`);
    if (c.io) sets.push(`ssd.io=${c.io}`);
    const log = [];
    const began = process.hrtime.bigint();
    const worker = start(`${bin}/isletd`, ['--config', config, ...sets.filter(Boolean).flatMap((s) => ['--set', s])], {
        limit: group,
        seconds: c.limitSeconds,
        env: { RUNTIME_DIRECTORY: runtime, STATE_DIRECTORY: runtime },
        onLine: (line) => log.push(line),
        onError: (line) => log.push(line),
    });
    const passes = [];
    const client = start(`${bin}/bench_outofcore`, ['client', `${runtime}/worker.sock`, '--pid', String(worker.pid), '--model', c.model, ...caseArgs(c), ...(c.resident ? ['--resident', '1'] : []), ...(c.ids ? ['--out', c.ids] : [])], {
        seconds: c.limitSeconds,
        onLine: (line) => passes.push(passOf(line)),
    });
    const clientEnded = await client.ended;
    worker.stop();
    const workerEnded = await worker.ended;
    const errors = log.filter((line) => line.startsWith('error '));
    return {
        name: 'islet',
        passes,
        log,
        firstTokenSeconds: passes[0] && Number(BigInt(passes[0].first_token_ns) - began) / 1e9,
        peak: group?.peak(),
        kills: group?.kills(),
        error: failure(workerEnded, 'isletd') ?? failure(clientEnded, 'client') ?? errors[0],
    };
}

// ---- llama.cpp of node-llama-cpp --------------------------------------------------------------------------------

// c.ids: the text to compute, or undefined for noise.
export async function measurePeer(bin, libraries, c, group) {
    const passes = [];
    const args = [c.model, '--backends', libraries, '--threads', threads, ...caseArgs(c), ...(c.ids ? ['--feed', c.ids] : [])];
    const ended = await start(`${bin}/peer_llama`, args, { limit: group, seconds: c.limitSeconds, onLine: (line) => passes.push(passOf(line)) }).ended;
    return { name: 'llama.cpp (node-llama-cpp 3.22.1)', passes, peak: group?.peak(), kills: group?.kills(), error: failure(ended, 'peer_llama') };
}

// ---- native llama-bench -----------------------------------------------------------------------------------------

function countersOf(pid, model) {
    const device = fs.statSync(model, { bigint: true }).dev;
    const at = `/sys/dev/block/${(device >> 8n) & 0xfffn}:${device & 0xffn}/stat`;
    const stat = fs.readFileSync(`/proc/${pid}/stat`, 'utf8');
    return {
        disk_bytes: fs.existsSync(at) ? Number(fs.readFileSync(at, 'utf8').trim().split(/\s+/)[2]) * 512 : 0,
        process_bytes: Number(/^read_bytes: (\d+)/m.exec(fs.readFileSync(`/proc/${pid}/io`, 'utf8'))[1]),
        major_faults: Number(stat.slice(stat.lastIndexOf(')') + 2).split(' ')[9]),
    };
}

// Its random tokens are its own; no prompt comes before a decode; one client. Counters are taken when it says (--progress)
// that a repetition begins, so the last one has none.
export async function measureNative(program, name, c, group) {
    if (c.clients !== 1) return { name, passes: [], error: 'llama-bench runs one client' };
    const help = execFileSync(program, ['--help'], { encoding: 'utf8' });
    const prefill = c.tokens === 0;
    const args = ['-m', c.model, '-t', threads, '-p', prefill ? String(c.prompt) : '0', '-n', String(c.tokens), '-r', String(c.passes), '-o', 'json'];
    if (help.includes('--no-warmup')) args.push('--no-warmup');
    if (help.includes('--progress')) args.push('--progress');
    if (help.includes('--override-tensor')) args.push('-ot', '.*=CPU'); // without repacked copies
    let json = '';
    const marks = [];
    const child = start(program, args, {
        limit: group,
        seconds: c.limitSeconds,
        onLine: (line) => (json += line),
        onError: (line) => / run \d+\/\d+$/.test(line) && marks.push(countersOf(child.pid, c.model)),
    });
    const ended = await child.ended;
    const passes = [];
    if (ended.code === 0) {
        const samples = JSON.parse(json)[0].samples_ns;
        samples.forEach((ns, i) => {
            const [from, to] = [marks[i], marks[i + 1]];
            const phase = { tokens: prefill ? c.prompt : c.tokens, seconds: ns / 1e9 };
            if (from && to) for (const key of Object.keys(from)) phase[key] = to[key] - from[key];
            passes.push({ [prefill ? 'prompt' : 'decode']: from && to ? phaseOf(phase) : phase });
        });
    }
    return { name, passes, peak: group?.peak(), kills: group?.kills(), error: failure(ended, name) };
}
