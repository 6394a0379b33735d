// What cachesim says about a phase of a bench run: isletd records the routes of all passes (route.trace), and a policy's
// bytes for a phase are those up to its end less those up to its beginning. For Belady, who sees the end, that is a
// figure to compare with rather than a bound.
import { execFileSync } from 'node:child_process';
import fs from 'node:fs';

const HEAD_BYTES = 24;

// Ends of records, with the positions of their rows (the layout is daemon/route_trace.h's).
function records(data) {
    const [layers, , used] = [8, 12, 16].map((at) => data.readUInt32LE(at));
    if (data.toString('latin1', 0, 8) !== 'ISLETRT1') throw new Error('not a route trace');
    const rowBytes = 8 + 2 * layers * used;
    const found = [];
    let at = HEAD_BYTES + 8 * layers;
    const begin = at;
    while (at + 4 <= data.length) {
        const n = data.readUInt32LE(at);
        const end = at + 4 + n * rowBytes;
        if (end > data.length) break;
        const positions = Array.from({ length: n }, (_, i) => data.readUInt32LE(at + 4 + i * rowBytes + 4));
        found.push({ end, positions });
        at = end;
    }
    return { begin, found };
}

// Where in the file each pass has its prompt, its decode and all of it: [{prompt: [from, to], decode: [from, to], ...}].
function phases(data, c) {
    const { begin, found } = records(data);
    const passes = [];
    let at = begin;
    let index = 0;
    for (let pass = 0; pass < c.passes && index < found.length; pass++) {
        const from = at;
        let left = c.clients;
        while (index < found.length && left > 0) {
            left -= found[index].positions.filter((p) => p === c.prompt - 1).length;
            at = found[index++].end;
        }
        const middle = at;
        while (index < found.length && !found[index].positions.includes(0)) at = found[index++].end;
        passes.push({ prompt: [from, middle], decode: [middle, at], whole: [from, at] });
    }
    return { begin, passes };
}

// Bytes and rows of each policy for the first `end` bytes of the trace.
function replay(bin, folder, data, begin, end, capacity) {
    if (end <= begin) return undefined;
    const file = `${folder}/trace-cut`;
    fs.writeFileSync(file, data.subarray(0, end));
    const rows = JSON.parse(execFileSync(`${bin}/cachesim`, [file, '--json', '--bytes', `${capacity} B`], { encoding: 'utf8', stdio: ['ignore', 'pipe', 'pipe'] }));
    return rows.find((row) => row.capacity === capacity);
}

const policies = ['lru', 'lfu', 'decay', 'static', 'ours', 'belady'];

// {lru, lfu, decay, static, ours, belady: bytes a token} of a pass's phase ('prompt', 'decode', or 'whole' by
// generated token) with a cache of `capacity` bytes, or undefined where the trace has no such phase.
export function phaseBytes(bin, folder, trace, c, pass, phase, capacity) {
    const data = fs.readFileSync(trace);
    if (data.length < HEAD_BYTES) return undefined; // its writer died
    const { begin, passes } = phases(data, c);
    const [from, to] = passes.at(pass)?.[phase] ?? [0, 0];
    const after = replay(bin, folder, data, begin, to, capacity);
    if (from >= to || !after) return undefined;
    const before = replay(bin, folder, data, begin, from, capacity);
    const bytes = (row, name) => (row ? row[name].bytes_per_token * row.tokens : 0);
    const tokens = phase === 'whole' ? c.clients * (c.tokens + 1) : after.tokens - (before?.tokens ?? 0);
    return Object.fromEntries(policies.map((name) => [name, (bytes(after, name) - bytes(before, name)) / tokens]));
}
