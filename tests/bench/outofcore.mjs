// make bench-outofcore: a model larger than the memory, isletd against llama.cpp by mmap under the same cgroup limit.
// Writes build/bench/outofcore.json (a row a line), outofcore-detail.json (all counters), and prints a table.
import { execFileSync } from 'node:child_process';
import fs from 'node:fs';
import os from 'node:os';
import path from 'node:path';

import { Skip, diskRate, makeLimit, restoreReadAhead, setReadAhead, stopAll, temporaryFolder } from './outofcore_host.mjs';
import { phaseBytes } from './outofcore_trace.mjs';
import { hasSetting, measureNative, measureOurs, measurePeer } from './outofcore_sides.mjs';

const help = `make bench-outofcore [NAME=value ...], as root on a quiet machine; about 25 minutes a model.
  ROUTERS="m89 skewed topics uniform"   generated models (build/models, 9.15 GB each, kept); default: m89
  GGUFS="FILE=NAME ..."     other models instead, and what their router is called
  BUDGETS="1.5 3 6"         memory limits in GB (10^9 bytes); the rows of several clients, prefill, read-ahead and buffered reads use 3, or the first
  ROWS="start resident decode clients prefill readahead buffered"   which rows to measure
  SIDES="ours peer"         which engines
  TOKENS=32 PROMPT_TOKENS=16 tokens decoded and prompt tokens before them, each client and pass
  PASSES=3                  passes of a decode row: the first is cold, the last is the warm one
  SECONDS_MAX=120           a decode pass ends after so long; LIMIT_S=420 ends a process
  LLAMA_BENCH= IK_BENCH=    native llama-bench programs; they take the peer's place for one client
  CLIENTS=4                 in the rows of several clients
  SETS="memory.kv_budget=128 MiB"   more settings of isletd, separated by commas
  NICE=-10 THREADS=2 DISK_RATE=bytes/s
Quick look: make bench-outofcore BUDGETS=3 ROWS="decode" TOKENS=12 PASSES=1`;

const RESERVE = 64 << 20; // what isletd may use beyond memory.ram_budget, a constant of its documentation
const READ_AHEAD_KIB = 128;
const READ_AHEAD_LARGE_KIB = 8192;

const B = process.env.B ?? 'build';
const bin = `${B}/bin`;
const words = (name, fallback) => (process.env[name] ?? fallback).split(/\s+/).filter(Boolean);
const number = (name, fallback) => Number(process.env[name] ?? fallback);
const limits = words('BUDGETS', '1.5 3 6').map((gb) => Math.round(Number(gb) * 1e9));
const wanted = words('ROWS', 'start resident decode clients prefill readahead buffered');
const sides = words('SIDES', 'ours peer');
const passes = number('PASSES', 3);
const common = { prompt: number('PROMPT_TOKENS', 16), tokens: number('TOKENS', 32), seconds: number('SECONDS_MAX', 120), limitSeconds: number('LIMIT_S', 420) };
const kinds = {
    decode: { ...common, clients: 1, passes },
    clients: { ...common, clients: number('CLIENTS', 4), passes: Math.min(passes, 2) },
    prefill: { ...common, clients: 1, passes: Math.min(passes, 2), prompt: 512, tokens: 0 },
    readahead: { ...common, clients: 1, passes: 1 },
    buffered: { ...common, clients: 1, passes: Math.min(passes, 2), io: 'buffered' },
    start: { ...common, clients: 1, passes: 1, prompt: 1, tokens: 1 },
};

const folder = temporaryFolder();
fs.mkdirSync(`${B}/bench`, { recursive: true });
const rowsFile = `${B}/bench/outofcore.json`;
const detailFile = `${B}/bench/outofcore-detail.json`;

const say = (text) => console.log(text);
const drop = (file) => execFileSync(`${bin}/bench_outofcore`, ['drop', file], { stdio: ['ignore', 'inherit', 'inherit'] });
const textOf = (kind) => (kind === 'readahead' || kind === 'buffered' ? 'decode' : kind); // kinds with the same text
const phaseKey = (kind) => (kind === 'prefill' ? 'prompt' : kind === 'clients' ? 'whole' : 'decode');
const rateOf = (p) => (p && p.tokens > 0 && p.seconds > 0 ? p.tokens / p.seconds : undefined);
// A pass's phase; 'whole' is prompts and answers by generated token: where clients take turns, the phases of one lie
// within those of others. The peer's first token of each client comes out of the prompts.
function phaseOf(side, passIndex, key, clients) {
    const p = side?.passes.at(passIndex);
    if (!p || key !== 'whole') return p?.[key];
    const sum = (key) => (p.prompt[key] ?? 0) + (p.decode[key] ?? 0);
    const keys = ['seconds', 'bytes', 'diskBytes', 'faults', 'hits', 'misses', 'steps', 'groups'];
    return { ...Object.fromEntries(keys.map((k) => [k, sum(k)])), tokens: p.answers ?? p.decode.tokens + clients };
}
const perToken = (p, key) => (p && p.tokens > 0 && p[key] !== undefined ? p[key] / p.tokens : undefined);
const short = (x, digits) => (x === undefined ? '-' : x.toFixed(digits));

const available = () => Number(/MemAvailable:\s+(\d+)/.exec(fs.readFileSync('/proc/meminfo', 'utf8'))[1]) * 1024;

// ---- one measurement --------------------------------------------------------------------------------------------

// Runs one engine on a case with the file dropped before (cold) and under a limit (0: none).
async function measure(model, kind, limit, cold, run) {
    if (cold) drop(model);
    // Both sides find the same: free memory that is there, not still with the host of a virtual machine.
    const memory = Math.floor(Math.min(limit || fs.statSync(model).size * 1.1, available() * 0.9));
    execFileSync(`${bin}/bench_outofcore`, ['touch', String(memory)], { stdio: 'inherit' });
    const group = limit ? makeLimit(limit) : undefined;
    try {
        return await run({ ...kinds[kind], model }, group);
    } finally {
        group?.remove();
    }
}

function peersOf(clients, libraries) {
    const native = [];
    if (clients === 1)
        for (const [name, program] of [['llama.cpp (native)', process.env.LLAMA_BENCH], ['ik_llama.cpp (native)', process.env.IK_BENCH]])
            if (program) native.push((c, group) => measureNative(program, name, c, group));
    return native.length > 0 ? native : [(c, group) => measurePeer(bin, libraries, c, group)];
}

// ---- rows -------------------------------------------------------------------------------------------------------

// Bytes a token of each policy of cachesim, with the slots that isletd had.
function simulate(state, kind, passIndex, ours) {
    const capacity = ours.passes.at(passIndex)?.slots_bytes;
    const trace = traceFile(kind);
    if (!capacity || !fs.existsSync(trace)) return undefined;
    return phaseBytes(bin, folder, trace, kinds[kind], passIndex, phaseKey(kind), capacity);
}

function rowOf(state, kind, phase, passIndex, limit, ours, peers) {
    const key = phaseKey(kind);
    const clients = kinds[kind].clients;
    const at = (side) => phaseOf(side, passIndex, key, clients);
    const best = peers.filter((p) => rateOf(at(p)) !== undefined).sort((a, b) => rateOf(at(b)) - rateOf(at(a)))[0];
    const [mine, theirs] = [at(ours), at(best)];
    const bytes = perToken(mine, 'bytes');
    const resident = state.resident[textOf(kind)];
    const rate = ours?.diskRate || state.rate;
    const ceilings = [resident, bytes > 0 && rate ? rate / bytes : undefined].filter((x) => x !== undefined);
    const limitRate = ceilings.length > 0 ? Math.min(...ceilings) : undefined;
    const speed = rateOf(mine);
    const simulated = limit && mine ? simulate(state, kind, passIndex, ours) : undefined;
    return {
        model: path.basename(state.model),
        budget: limit || null,
        router: state.router,
        clients,
        phase,
        tok_s: speed,
        tok_s_with_prompts: kinds[kind].tokens > 0 ? rateOf(phaseOf(ours, passIndex, 'whole', clients)) : undefined,
        peer: best?.name ?? peers[0]?.name,
        peer_tok_s: rateOf(theirs),
        ratio: speed && rateOf(theirs) ? speed / rateOf(theirs) : undefined,
        bytes_per_token: bytes,
        belady_bytes_per_token: simulated?.belady,
        disk_rate: rate,
        share_of_limit: speed && limitRate ? speed / limitRate : undefined,
        limit_tok_s: limitRate,
        read_ahead_kib: kind === 'readahead' ? READ_AHEAD_LARGE_KIB : READ_AHEAD_KIB,
        faults_per_token: perToken(mine, 'faults'),
        device_bytes_per_token: perToken(mine, 'diskBytes'),
        distinct_experts_per_step: mine?.steps > 0 ? mine.groups / mine.steps : undefined,
        hit_share: mine?.hits + mine?.misses > 0 ? mine.hits / (mine.hits + mine.misses) : undefined,
        peak_bytes: ours?.peak,
        same_bits: ours?.sameBits,
        peer_bytes_per_token: perToken(theirs, 'bytes'),
        peer_faults_per_token: perToken(theirs, 'faults'),
        simulated_bytes_per_token: simulated,
        load: os.loadavg()[0],
        error: [ours, ...peers].map((s) => s?.error).filter(Boolean).join('; ') || undefined,
    };
}

const columns = '  budget  cl phase            ours tok/s  limit share  MB/tok Belady faults | peer tok/s MB/tok faults | ratio bits load';

function print(row) {
    const mb = (x) => short(x === undefined ? undefined : x / 1e6, 1);
    const percent = row.share_of_limit === undefined ? '-' : `${Math.round(row.share_of_limit * 100)} %`;
    const left = [row.budget ? `${row.budget / 1e9} GB` : 'none'].map((t) => t.padStart(8))[0];
    say(`${left}  ${String(row.clients).padStart(2)} ${row.phase.padEnd(16)} ${short(row.tok_s, 2).padStart(10)} ${short(row.limit_tok_s, 2).padStart(6)} ${percent.padStart(5)}` +
        ` ${mb(row.bytes_per_token).padStart(7)} ${mb(row.belady_bytes_per_token).padStart(6)} ${short(row.faults_per_token, 0).padStart(6)}` +
        ` | ${short(row.peer_tok_s, 2).padStart(10)} ${mb(row.peer_bytes_per_token).padStart(6)} ${short(row.peer_faults_per_token, 0).padStart(6)}` +
        ` | ${short(row.ratio, 2).padStart(5)} ${row.same_bits === undefined ? '-' : row.same_bits ? 'same' : 'DIFFER'} ${short(row.load, 1)}`);
    if (row.tok_s_with_prompts !== undefined && row.clients === 1) say(`          with the prompts ${short(row.tok_s_with_prompts, 2)} tok/s`);
    if (row.error) say(`          ${row.error}`);
}

function keep(state, row) {
    print(row);
    fs.appendFileSync(rowsFile, JSON.stringify(row, (k, v) => (v === undefined ? null : v)) + '\n');
    state.failed ||= row.same_bits === false || (row.error?.includes('not finite') ?? false);
}

// ---- the plan ---------------------------------------------------------------------------------------------------

const idsFile = (kind) => `${folder}/ids-${textOf(kind)}`;

// A run without a limit must not push the machine into reclaim.
function needRoom(model) {
    const need = fs.statSync(model).size * 1.1;
    if (available() < need) throw new Skip(`resident takes ${(need / 1e9).toFixed(1)} GB, ${(available() / 1e9).toFixed(1)} are free`);
}

const traceFile = (kind) => `${folder}/trace-${textOf(kind)}`;

// The routes of a kind of row, in a run of its own: writing them must not cost a measured one.
async function traces(state) {
    if (!sides.includes('ours')) return;
    if (!fs.existsSync(`${bin}/cachesim`)) throw new Skip('no cachesim in this build');
    if (!hasSetting(bin, 'route.trace')) throw new Skip('this isletd has no route.trace');
    needRoom(state.model);
    for (const kind of ['decode', 'clients', 'prefill'])
        if (wanted.includes(kind)) {
            const ids = fs.existsSync(idsFile(kind)) ? undefined : idsFile(kind);
            const run = (c, group) => measureOurs(bin, folder, { ...c, trace: traceFile(kind), ids }, group);
            const { error } = await measure(state.model, kind, 0, false, run);
            if (error) fs.rmSync(traceFile(kind), { force: true });
            if (error) throw new Skip(error);
        }
}

// Answers depend on nothing but model, prompt and seed: whatever the limit, the ids are those of the first run of a kind.
function compareIds(kind, file) {
    const lines = (f) => fs.readFileSync(f, 'utf8').trim().split('\n');
    if (!fs.existsSync(file) || fs.statSync(file).size === 0) return undefined;
    if (!fs.existsSync(idsFile(kind))) {
        fs.copyFileSync(file, idsFile(kind));
        return undefined;
    }
    const [a, b] = [lines(idsFile(kind)), lines(file)];
    return b.every((line, i) => a[i] === undefined || a[i] === line);
}

async function oursOf(state, kind, limit, cold) {
    if (!sides.includes('ours')) return undefined;
    if (limit && !hasSetting(bin, 'ram_budget')) throw new Skip('this isletd has no memory.ram_budget');
    const ids = `${folder}/ids-now`;
    fs.rmSync(ids, { force: true });
    const budget = limit ? limit - RESERVE : undefined;
    const rate = () => (limit ? (diskRate(state.model, bin, 1).rate ?? 0) : 0);
    const before = rate();
    const ours = await measure(state.model, kind, limit, cold, (c, group) => measureOurs(bin, folder, { ...c, budget, ids, resident: !limit }, group));
    ours.diskRate = Math.max(before, rate()); // the disk is another one each minute
    ours.sameBits = compareIds(kind, ids);
    return ours;
}

async function peersMeasured(state, kind, limit, cold) {
    const results = [];
    const text = idsFile(kind);
    if (sides.includes('peer') && kinds[kind].io === undefined)
        for (const run of peersOf(kinds[kind].clients, state.libraries))
            results.push(await measure(state.model, kind, limit, cold, (c, group) => run({ ...c, ids: fs.existsSync(text) ? text : undefined }, group)));
    return results;
}

async function both(state, kind, limit, phases, cold = true) {
    let ours;
    try {
        ours = await oursOf(state, kind, limit, cold);
    } catch (e) {
        if (!(e instanceof Skip)) throw e;
        say(`skip: islet, ${kind}: ${e.message}`);
    }
    state.failed ||= Boolean(ours?.error);
    const peers = await peersMeasured(state, kind, limit, cold);
    fs.appendFileSync(detailFile, JSON.stringify({ model: state.model, kind, limit, ours, peers }) + '\n');
    for (const [phase, index] of phases) keep(state, rowOf(state, kind, phase, index, limit, ours, peers));
    return ours;
}

async function residentRows(state) {
    needRoom(state.model);
    const resident = (kind) => both(state, kind, 0, [[`${kind === 'prefill' ? 'prefill' : kind === 'clients' ? 'whole' : 'decode'} resident`, -1]], false);
    for (const kind of ['decode', 'clients', 'prefill']) {
        if (kind !== 'decode' && !wanted.includes(kind)) continue;
        const ours = await resident(kind);
        state.resident[kind] = rateOf(phaseOf(ours, -1, phaseKey(kind), kinds[kind].clients));
    }
}

async function startRow(state) {
    if (!sides.includes('ours')) return;
    const ours = await measure(state.model, 'start', 0, true, (c, group) => measureOurs(bin, folder, c, group));
    const row = { model: path.basename(state.model), budget: null, router: state.router, clients: 1, phase: 'start cold', seconds_to_first_token: ours.firstTokenSeconds, error: ours.error };
    say(`  start to first token, cold file, no limit: ${short(ours.firstTokenSeconds, 2)} s${ours.error ? `: ${ours.error}` : ''}`);
    fs.appendFileSync(rowsFile, JSON.stringify(row) + '\n');
}

async function budgetRows(state) {
    const middle = limits.includes(3e9) ? 3e9 : limits[0];
    const coldWarm = (name, n) => (n > 1 ? [[`${name} cold`, 0], [`${name} warm`, -1]] : [[`${name} cold`, 0]]);
    setReadAhead(state.model, READ_AHEAD_KIB);
    for (const limit of limits) if (wanted.includes('decode')) await both(state, 'decode', limit, coldWarm('decode', passes));
    if (wanted.includes('clients')) await both(state, 'clients', middle, coldWarm('whole', kinds.clients.passes));
    if (wanted.includes('prefill')) await both(state, 'prefill', middle, coldWarm('prefill', kinds.prefill.passes));
    if (wanted.includes('buffered')) await both(state, 'buffered', middle, coldWarm('decode buffered', kinds.buffered.passes));
    if (wanted.includes('readahead')) {
        setReadAhead(state.model, READ_AHEAD_LARGE_KIB);
        await both(state, 'readahead', middle, [['decode cold, 8 MiB', 0]]);
        setReadAhead(state.model, READ_AHEAD_KIB);
    }
}

async function attempt(what, run) {
    try {
        await run();
    } catch (e) {
        if (!(e instanceof Skip)) throw e;
        say(`skip: ${what}: ${e.message}`);
    }
}

async function modelRows(model, router, libraries) {
    const { rate, by } = diskRate(model, bin);
    const state = { model, router, libraries, rate, resident: {}, failed: false };
    for (const kind of Object.keys(kinds)) for (const file of [idsFile(kind), traceFile(kind)]) fs.rmSync(file, { force: true });
    say(`${model}: router ${router}, ${(fs.statSync(model).size / 1e9).toFixed(2)} GB; disk ${rate ? `${(rate / 1e9).toFixed(2)} GB/s` : 'not measured'} (${by})`);
    say(`  read-ahead ${READ_AHEAD_KIB} KiB; ${kinds.decode.prompt} prompt tokens, ${kinds.decode.tokens} decoded, ${passes} passes; nice ${process.env.NICE ?? -10}`);
    if (wanted.includes('start')) await attempt('start', () => startRow(state));
    say(columns);
    if (wanted.includes('resident')) await attempt('resident', () => residentRows(state));
    await attempt('Belady', () => traces(state));
    await attempt('budgets', () => budgetRows(state));
    const again = diskRate(model, bin).rate;
    say(`  disk at the end: ${again ? `${(again / 1e9).toFixed(2)} GB/s` : 'not measured'}`);
    return state.failed;
}

async function main() {
    if (process.argv.includes('--help')) return say(help);
    const needsPeer = sides.includes('peer');
    const libraries = needsPeer ? execFileSync('tests/bench/peer/build.sh', { encoding: 'utf8', stdio: ['ignore', 'pipe', 'inherit'], env: { ...process.env, B } }).trim() : '';
    fs.writeFileSync(rowsFile, '');
    fs.writeFileSync(detailFile, '');
    for (const word of words('GGUFS', `${B}/models/m89.gguf=m89`)) {
        const [model, router = 'm89'] = word.split('=');
        if (await modelRows(path.resolve(model), router, libraries)) process.exitCode = 1;
    }
    say(`rows: ${rowsFile}`);
}

function cleanUp() {
    stopAll();
    restoreReadAhead();
    fs.rmSync(folder, { recursive: true, force: true });
}
for (const signal of ['SIGINT', 'SIGTERM'])
    process.on(signal, () => {
        cleanUp();
        process.exit(130);
    });
try {
    await main();
} finally {
    cleanUp();
}
