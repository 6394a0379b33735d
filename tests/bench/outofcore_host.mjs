// What make bench-outofcore needs of the machine: a memory limit, the page cache without the model, the read-ahead of the
// disk, its rate of the day, and processes under these. Needs root; a Skip says what is missing.
import { execFileSync, spawn } from 'node:child_process';
import fs from 'node:fs';
import os from 'node:os';
import path from 'node:path';

export class Skip extends Error {}

const write = (file, text) => fs.writeFileSync(file, String(text));
const read = (file) => fs.readFileSync(file, 'utf8').trim();

// ---- memory limit -----------------------------------------------------------------------------------------------

const v1 = '/sys/fs/cgroup/memory';
const v2 = '/sys/fs/cgroup';

function makeV1(dir, bytes) {
    fs.mkdirSync(dir);
    write(`${dir}/memory.limit_in_bytes`, bytes);
    try {
        write(`${dir}/memory.memsw.limit_in_bytes`, bytes); // absent where swap is not counted
    } catch {}
    return {
        procs: `${dir}/cgroup.procs`,
        peak: () => Number(read(`${dir}/memory.max_usage_in_bytes`)),
        kills: () => Number(/oom_kill (\d+)/.exec(read(`${dir}/memory.oom_control`))?.[1] ?? 0),
    };
}

function makeV2(dir, bytes) {
    if (!read(`${v2}/cgroup.subtree_control`).split(' ').includes('memory')) write(`${v2}/cgroup.subtree_control`, '+memory');
    fs.mkdirSync(dir);
    write(`${dir}/memory.max`, bytes);
    try {
        write(`${dir}/memory.swap.max`, 0);
    } catch {}
    return {
        procs: `${dir}/cgroup.procs`,
        peak: () => (fs.existsSync(`${dir}/memory.peak`) ? Number(read(`${dir}/memory.peak`)) : undefined),
        kills: () => Number(/oom_kill (\d+)/.exec(read(`${dir}/memory.events`))?.[1] ?? 0),
    };
}

const made = new Set(); // folders of cgroups

// A cgroup stays busy for a moment after its last process.
function removeSoon(dir, tries) {
    try {
        fs.rmdirSync(dir);
        made.delete(dir);
    } catch (e) {
        if (tries === 0) throw e;
        Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, 100);
        removeSoon(dir, tries - 1);
    }
}

// A cgroup whose processes and page cache share `bytes`; remove() once they have ended.
export function makeLimit(bytes) {
    if (process.getuid() !== 0) throw new Skip('a memory limit needs root');
    const isV1 = fs.existsSync(`${v1}/memory.limit_in_bytes`);
    if (!isV1 && !(fs.existsSync(`${v2}/cgroup.controllers`) && read(`${v2}/cgroup.controllers`).includes('memory')))
        throw new Skip('no memory controller under /sys/fs/cgroup');
    const dir = `${isV1 ? v1 : v2}/islet-bench-${process.pid}`;
    let group;
    try {
        group = isV1 ? makeV1(dir, bytes) : makeV2(dir, bytes);
    } catch (e) {
        if (fs.existsSync(dir)) fs.rmdirSync(dir);
        throw new Skip(`a cgroup of ${bytes} bytes is refused: ${e.message}`);
    }
    made.add(dir);
    return { ...group, remove: () => removeSoon(dir, 50) };
}

// ---- the disk ---------------------------------------------------------------------------------------------------

function queueOf(file) {
    const dev = fs.statSync(file, { bigint: true }).dev;
    const major = Number(((dev >> 8n) & 0xfffn) | ((dev >> 32n) & ~0xfffn));
    const minor = Number((dev & 0xffn) | ((dev >> 12n) & ~0xffn));
    const at = `/sys/dev/block/${major}:${minor}`;
    if (!fs.existsSync(at)) throw new Skip(`${file} lies on no block device (${major}:${minor})`);
    return fs.existsSync(`${at}/queue`) ? `${at}/queue` : `${at}/../queue`;
}

const changed = new Map(); // file of /sys -> what stood there

export function setReadAhead(file, kib) {
    const at = `${queueOf(file)}/read_ahead_kb`;
    if (!changed.has(at)) changed.set(at, read(at));
    try {
        write(at, kib);
    } catch (e) {
        throw new Skip(`read-ahead cannot be set: ${e.message}`);
    }
    if (Number(read(at)) !== kib) throw new Skip(`read-ahead is ${read(at)} KiB, not ${kib}`);
}

export function restoreReadAhead() {
    for (const [at, text] of changed) write(at, text);
    changed.clear();
}

// Bytes a second of direct reads of about 1 MB at random places: the best of bench_ssd's direct ways, else fio, or DISK_RATE.
export function diskRate(file, bin, rounds = 3) {
    if (process.env.DISK_RATE) return { rate: Number(process.env.DISK_RATE), by: 'DISK_RATE' };
    if (fs.existsSync(`${bin}/bench_ssd`)) {
        const out = execFileSync(`${bin}/bench_ssd`, [file, '--rounds', String(rounds), '--total', String(256 << 20)], { encoding: 'utf8' });
        const rates = out.slice(0, out.indexOf('burst')); // the second table is of times
        const rows = [...rates.matchAll(/^ +(?:4|8|16) (.*)$/gm)].map((m) => m[1].match(/[\d.]+(?= \()/g).slice(0, 2).map(Number));
        return { rate: Math.max(...rows.flat()) * 1e9, by: 'bench_ssd, 4 to 16 in flight' };
    }
    const args = ['--name=rate', `--filename=${file}`, '--readonly', '--direct=1', '--rw=randread', '--bs=1M', '--iodepth=8'];
    const limits = ['--runtime=4', '--time_based', '--randrepeat=0', '--output-format=json'];
    for (const engine of ['io_uring', 'libaio'])
        try {
            const out = execFileSync('fio', [...args, ...limits, `--ioengine=${engine}`], { encoding: 'utf8', stdio: ['ignore', 'pipe', 'ignore'] });
            return { rate: JSON.parse(out.slice(out.indexOf('{'))).jobs[0].read.bw_bytes, by: `fio ${engine}, 8 in flight` };
        } catch {}
    return { rate: undefined, by: 'neither bench_ssd nor fio nor DISK_RATE' };
}

// ---- processes --------------------------------------------------------------------------------------------------

const running = new Set();

// Starts a program at NICE (-10), in a cgroup if one is given. Resolves `ended` to {code, signal, timedOut, errors};
// each line of its output goes to onLine. Ended by force after `seconds`.
export function start(command, args, { limit, seconds = 600, env = {}, onLine = () => {}, onError = () => {} } = {}) {
    const script = `${limit ? 'echo $$ >"$LIMIT_PROCS" && ' : ''}exec nice -n "$BENCH_NICE" "$@"`;
    const child = spawn('sh', ['-c', script, 'sh', command, ...args], {
        stdio: ['ignore', 'pipe', 'pipe'],
        env: { ...process.env, ...env, LIMIT_PROCS: limit?.procs ?? '', BENCH_NICE: process.env.NICE ?? '-10' },
    });
    running.add(child);
    let timedOut = false;
    let errors = '';
    const timer = setTimeout(() => {
        timedOut = true;
        child.kill('SIGKILL');
    }, seconds * 1000);
    const lines = (stream, each) => {
        let rest = '';
        stream.setEncoding('utf8').on('data', (text) => {
            const parts = (rest + text).split('\n');
            rest = parts.pop();
            parts.forEach(each);
        });
    };
    lines(child.stdout, onLine);
    lines(child.stderr, (line) => {
        errors = (errors + line + '\n').slice(-2000);
        onError(line);
    });
    const ended = new Promise((resolve) =>
        child.on('close', (code, signal) => {
            clearTimeout(timer);
            running.delete(child);
            resolve({ code, signal, timedOut, errors: errors.trim() });
        }),
    );
    return { pid: child.pid, ended, stop: () => child.kill('SIGTERM') };
}

// Kills what runs, removes cgroups.
export function stopAll() {
    for (const child of running) child.kill('SIGKILL');
    for (const dir of made) removeSoon(dir, 50);
}

export function temporaryFolder() {
    return fs.mkdtempSync(path.join(os.tmpdir(), 'islet-outofcore-'));
}
