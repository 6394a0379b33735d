// The command `islet`: plan, up, run, ps, status, bench, and chat on a pseudo-terminal.
import test, { after, before, describe } from 'node:test';
import { spawn, spawnSync } from 'node:child_process';
import { createConnection } from 'node:net';
import { closeSync, mkdtempSync, openSync, readFileSync, rmSync, writeFileSync, readdirSync } from 'node:fs';
import path from 'node:path';
import { assert, bin, freePort, sleep, slow, startServer, tinymoe } from './clients/server.mjs';

const islet = path.join(bin, 'islet');
const pty = new URL('pty_run.py', import.meta.url).pathname;
const dir = mkdtempSync('/tmp/islet-cli-');
after(() => rmSync(dir, { recursive: true, force: true }));
const clean = { ...process.env, NO_COLOR: '', STATE_DIRECTORY: dir, RUNTIME_DIRECTORY: dir, TERM: 'xterm' };
delete clean.ISLET_SERVER;

function run(args, { input = '', env = {} } = {}) {
  const r = spawnSync(islet, args, { input, env: { ...clean, ...env }, encoding: 'utf8', timeout: 60000 * slow });
  return { code: r.status, out: r.stdout, err: r.stderr };
}

function alive(pid) {
  try {
    process.kill(pid, 0);
    return !/^State:\s+Z/m.test(readFileSync(`/proc/${pid}/status`, 'utf8'));
  } catch {
    return false;
  }
}

const childrenOf = (pid) => readFileSync(`/proc/${pid}/task/${pid}/children`, 'utf8').trim().split(' ').filter(Boolean).map(Number);

async function until(what, condition, ms = 15000) {
  const end = Date.now() + ms * slow;
  for (;;) {
    const v = await condition();
    if (v) return v;
    if (Date.now() > end) throw new Error(`not within ${ms} ms: ${what}`);
    await sleep(20);
  }
}

// Greets the worker, asks it to drain and collects its frames; resolves when it closes the connection.
function drain(socket, frames) {
  const frame = (cmd, ...payload) => Buffer.from([0, 0, 0, 13 + payload.length, cmd, 0, 0, 0, 0, 0, 0, 0, 0, ...payload]);
  return new Promise((resolve, reject) => {
    const c = createConnection(socket, () => c.write(Buffer.concat([frame(0x05, 0, 0, 0, 1, 0, 1, 0x74), frame(0x09)])));
    let rest = Buffer.alloc(0);
    c.on('data', (d) => {
      rest = Buffer.concat([rest, d]);
      while (rest.length >= 13 && rest.length >= rest.readUInt32BE(0)) {
        const n = rest.readUInt32BE(0);
        frames.push({ cmd: rest[4], payload: rest.subarray(13, n) });
        rest = rest.subarray(n);
      }
    });
    c.on('error', reject);
    c.on('close', resolve);
  });
}

// `islet up` with a runtime directory and port of its own.
class Up {
  async start(extra = []) {
    this.dir = mkdtempSync('/tmp/islet-up-');
    this.port = await freePort();
    this.out = this.err = '';
    this.child = spawn(islet, ['up', '--model', tinymoe, '--set', `server.listen=127.0.0.1:${this.port}`, '--set', 'compute.threads=2', ...extra],
      { env: { ...clean, RUNTIME_DIRECTORY: this.dir, STATE_DIRECTORY: this.dir }, stdio: ['ignore', 'pipe', 'pipe'] });
    this.child.stdout.setEncoding('utf8').on('data', (d) => { this.out += d; });
    this.child.stderr.setEncoding('utf8').on('data', (d) => { this.err += d; });
    this.exited = new Promise((resolve) => this.child.on('exit', (code, signal) => resolve({ code, signal })));
    return this;
  }

  async ready() {
    await until(`ready line; got ${this.err}`, () => this.out.includes('ready: ') || this.child.exitCode !== null);
    assert.equal(this.child.exitCode, null, this.err);
    this.server = `unix:${this.dir}/http.sock`;
    return this;
  }

  children() {
    return Object.fromEntries(childrenOf(this.child.pid).map((pid) => [readFileSync(`/proc/${pid}/comm`, 'utf8').trim(), pid]));
  }

  done() {
    if (this.child.exitCode === null) this.child.kill('SIGKILL');
    rmSync(this.dir, { recursive: true, force: true });
  }
}

describe('words of the command line', () => {
  test('help teaches', () => {
    assert.equal(run([]).code, 2);
    for (const c of ['up', 'plan', 'run', 'chat', 'ps', 'status', 'bench']) {
      const r = run(['help', c]);
      assert.equal(r.code, 0);
      assert.match(r.out, new RegExp(`usage: islet ${c}`));
      assert.equal(run([c, '--help']).out, r.out);
    }
    assert.match(run(['--version']).out, /^islet \d+\.\d+\.\d+\n$/);
  });
  test('mistakes are named, with the nearest right word', () => {
    assert.match(run(['rnu']).err, /did you mean 'run'/);
    assert.match(run(['run', '--modle', 'x', 'hi']).err, /did you mean '--model'/);
    assert.match(run(['run', '--max-tokens', 'many', 'hi']).err, /--max-tokens: 'many' is not a whole number from 0 to/);
    assert.match(run(['run', '--seed']).err, /--seed needs a value/);
    assert.match(run(['ps', 'now']).err, /unexpected word 'now'/);
    for (const args of [['rnu'], ['run', '--modle', 'x'], ['run', '--seed'], ['ps', 'now'], ['bench', '--clients', '0']]) assert.equal(run(args).code, 2, args.join(' '));
  });
  test('no server: what to do', () => {
    const r = run(['run', 'hi', '--server', `unix:${dir}/absent.sock`]);
    assert.equal(r.code, 69);
    assert.match(r.err, /no server at unix:.*: start one with `islet up --model FILE`/);
    for (const c of ['ps', 'status', 'chat', 'bench']) assert.equal(run([c, '--server', 'http://127.0.0.1:1']).code, 69, c);
  });
  test('no model, a missing model, a bad setting', () => {
    assert.match(run(['up']).err, /islet up --model FILE/);
    const missing = run(['up', '--model', `${dir}/absent.gguf`]);
    assert.equal(missing.code, 78);
    assert.match(missing.err, /absent\.gguf.*No such file/);
    assert.match(run(['up', '--set', 'server.lsten=x']).err, /listen/);
    writeFileSync(`${dir}/junk.gguf`, 'this is not a model');
    const junk = run(['up', '--private', '--model', `${dir}/junk.gguf`]);
    assert.equal(junk.code, 78, junk.err);
    assert.match(junk.err, /junk\.gguf/);
  });
});

test('run --model serves the file for one question and leaves nothing behind', async () => {
  const before = readdirSync('/tmp').filter((n) => /^islet-\w{6}$/.test(n));
  const r = run(['run', '--model', tinymoe, 'What is the capital of Norway?']);
  assert.equal(r.code, 0, r.err);
  assert.equal(r.out, 'The capital of Norway is Oslo.\n');
  assert.match(r.err, /tok\/s/);
  assert.deepEqual(readdirSync('/tmp').filter((n) => /^islet-\w{6}$/.test(n) && !before.includes(n)), []);
});

describe('plan', () => {
  const plan = (...args) => run(['plan', '--model', tinymoe, ...args]);
  test('says needs, machine, budget and speed, and what other budgets give', () => {
    const r = plan('--set', 'memory.ram_budget=1 GiB');
    assert.equal(r.code, 0, r.err);
    assert.match(r.out, /^model     Islet TinyMoE: qwen3moe, 4 layers, 16 experts of 204\.00 KiB each, top-4; file 15\.87 MiB$/m);
    assert.match(r.out, /^needs     dense weights 3\.00 MiB, work [\d.]+ MiB, experts 13\.50 MiB; one token uses 3\.19 MiB of experts$/m);
    assert.match(r.out, /^kv        2\.00 KiB a position: 4\.00 MiB for a context of 2048, /m);
    assert.match(r.out, /^machine   RAM [\d.]+ GiB, [\d.]+ [GM]iB available.*; \w+ kernels, \d+ threads?$/m);
    assert.match(r.out, /^reads     RAM [\d.]+ GB\/s with all threads, this file [\d.]+ GB\/s \(.*depth \d+.*\)$/m);
    assert.match(r.out, /^budget    1\.00 GiB \(memory\.ram_budget\), .*everything fits, all 64 experts stay in memory$/m);
    assert.match(r.out, /^expect    decode up to [\d.]+ tok\/s/m);
    assert.match(r.out, /the least that works .* 100 % /s);
    assert.match(r.out, /Expected from measured rates, not promised\.\n$/);
  });
  test('its sizes are those of a started worker', async () => {
    for (const budget of ['22 MiB', '48 MiB']) {
      const r = plan('--json', '--set', `memory.ram_budget=${budget}`);
      assert.equal(r.code, 0, r.err);
      const { needs, budget: b, error } = JSON.parse(r.out);
      assert.equal(error, null);
      const server = await startServer({ set: { 'memory.ram_budget': budget } });
      try {
        const status = JSON.parse(run(['status', '--json', '--server', `unix:${server.socket}`]).out);
        const w = status.worker;
        assert.deepEqual(
          [b.slots_bytes, b.used_bytes, b.kv_bytes, b.work_bytes, needs.weights_bytes, b.context],
          [w.ram_slots_bytes, w.ram_budget_bytes, w.kv_pages_total * w.kv_page_bytes, w.work_bytes, w.weights_bytes, status.n_ctx]);
      } finally {
        await server.stop();
      }
    }
  });
  test('the least that it names works, however small and wherever it is read', () => {
    const small = ['--set', 'batch.prefill_chunk=1', '--set', 'batch.max_sequences=1'];
    for (const extra of [small, [...small, '--set', 'memory.kv_budget=1.3 MiB'], ['--set', 'memory.kv_budget=2.61 MiB']]) {
      const less = plan(...extra, '--set', 'memory.ram_budget=1 MiB');
      assert.equal(less.code, 78);
      const named = [less.err.match(/([\d.]+ MiB) is the least that works/)[1], less.out.match(/^ +([\d.]+ MiB) +the least that works/m)[1]];
      for (const least of named) {
        const again = plan(...extra, '--set', `memory.ram_budget=${least}`);
        assert.equal(again.code, 0, again.err);
      }
    }
  });
  test('each budget that it names works, and one less than the least does not', () => {
    const all = JSON.parse(plan('--json').out);
    assert.ok(all.other_budgets.length >= 2);
    assert.deepEqual(all.other_budgets.map((b) => b.ram_budget_bytes), all.other_budgets.map((b) => b.ram_budget_bytes).toSorted((a, b) => a - b));
    for (const b of all.other_budgets) {
      const again = plan('--json', '--set', `memory.ram_budget=${b.ram_budget_bytes} B`);
      assert.equal(again.code, 0, again.err);
      assert.equal(JSON.parse(again.out).budget.slots_bytes, b.slots_bytes, b.name);
      assert.ok(b.expected_tok_s.misses <= b.expected_tok_s.uniform && b.expected_tok_s.uniform <= b.expected_tok_s.usual);
    }
    const least = all.other_budgets[0].ram_budget_bytes;
    const less = plan('--json', '--set', `memory.ram_budget=${least - 2 ** 20} B`);
    assert.equal(less.code, 78);
    assert.match(less.err, /^isletd: memory\.ram_budget .* is too small: .* is the least that works; raise it, or lower .*\n$/);
    const refused = JSON.parse(less.out);
    assert.equal(refused.budget, null);
    assert.equal(`isletd: ${refused.error}\n`, less.err);
    assert.equal(refused.other_budgets[0].ram_budget_bytes, least);
  });
  test('what would not be served is one clear line', () => {
    const one = (text, args) => {
      const r = run(['plan', ...args]);
      assert.equal(r.code, 78, r.out);
      assert.match(r.err, text);
      assert.equal(r.err.trim().split('\n').length, 1, r.err);
      assert.equal(r.out, '');
    };
    writeFileSync(`${dir}/junk.gguf`, 'this is not a model');
    writeFileSync(`${dir}/cut.gguf`, readFileSync(tinymoe).subarray(0, 1 << 20));
    one(/absent\.gguf: No such file/, ['--model', `${dir}/absent.gguf`]);
    one(/junk\.gguf/, ['--model', `${dir}/junk.gguf`]);
    one(/cut\.gguf/, ['--model', `${dir}/cut.gguf`]);
    one(/model\.path is not set/, []);
    one(/lsten.*listen/, ['--set', 'server.lsten=x']);
    const much = plan('--set', 'memory.ram_budget=9 TiB', '--set', 'memory.kv_budget=8 TiB');
    assert.equal(much.code, 78);
    assert.match(much.err, /^isletd: memory: weights .* are more than the .* available; set memory\.ram_budget .*\n$/);
    assert.match(much.out, /more than is available/);
  });
  test('a plan that cannot be written is an error', () => {
    const full = openSync('/dev/full', 'w');
    try {
      for (const more of [[], ['--json']]) {
        const r = spawnSync(islet, ['plan', '--model', tinymoe, ...more], { env: clean, encoding: 'utf8', stdio: ['ignore', full, 'pipe'], timeout: 60000 * slow });
        assert.equal(r.status, 78);
        assert.match(r.stderr, /^isletd: the plan cannot be written: No space left on device\n$/);
      }
    } finally {
      closeSync(full);
    }
  });
});

describe('a running server', () => {
  let server, at;
  before(async () => {
    server = await startServer();
    at = ['--server', `unix:${server.socket}`];
  });
  after(() => server?.stop());

  test('run: words, standard input, raw, seed, system', () => {
    assert.equal(run(['run', ...at, 'What', 'is', 'the', 'capital', 'of', 'Norway?']).out, 'The capital of Norway is Oslo.\n');
    assert.equal(run(['run', ...at], { input: 'What is the capital of Norway?\n' }).out, 'The capital of Norway is Oslo.\n');
    assert.equal(run(['run', '-', '--server', server.base], { input: 'What is the capital of Norway?' }).out, 'The capital of Norway is Oslo.\n');
    const raw = run(['run', ...at, '--raw', '--max-tokens', '5', 'The sun']);
    assert.equal(raw.code, 0, raw.err);
    assert.ok(!raw.out.endsWith('\n') && raw.out.length > 0);
    const seeded = () => run(['run', ...at, '--seed', '7', '--temperature', '1', '--max-tokens', '20', 'Tell me a story.']);
    const [a, b] = [seeded(), seeded()];
    assert.equal(a.out, b.out);
    assert.match(a.err, /seed 7/);
    assert.equal(run(['run', ...at, '--quiet', 'Hello!']).err, '');
    assert.equal(run(['run', ...at, '--system', 'You are a helpful assistant.', "Translate 'dog' into German."]).out, "In German, 'dog' is 'der Hund'.\n");
  });
  test('run: a refusal is one clear line', () => {
    const r = run(['run', ...at, 'word '.repeat(4000)]);
    assert.equal(r.code, 1);
    assert.match(r.err, /^islet run: .*2048 tokens/);
    assert.equal(run(['run', ...at], { input: Buffer.from([0xff, 0xfe]) }).code, 2);
  });
  test('run: Ctrl-C ends the answer with 130 and cancels it', async () => {
    const c = spawn(islet, ['run', ...at, '--raw', '--max-tokens', '1500', '--temperature', '0', '1 2 3 4'], { env: clean }); // it counts on to 1500 tokens
    await new Promise((resolve) => c.stdout.once('data', resolve));
    c.kill('SIGINT');
    const code = await new Promise((resolve) => c.on('exit', resolve));
    assert.equal(code, 130);
    await server.idle(2000);
  });
  test('ps and status', () => {
    const ps = run(['ps', ...at]);
    assert.equal(ps.code, 0, ps.err);
    for (const word of ['model', 'sequences', 'memory', 'kv', 'experts', 'rates', 'requests']) assert.match(ps.out, new RegExp(`^${word} `, 'm'));
    assert.ok(!ps.out.includes('\x1b'), 'no colour in a pipe');
    assert.match(ps.out, /weights 3\.00 MiB/);
    assert.match(ps.out, /^experts +RAM 13\.50 MiB of 13\.50 MiB/m);
    const status = run(['status', ...at]);
    assert.equal(status.code, 0);
    assert.match(status.out, /^serving at unix:/);
    assert.match(status.out, /generated_tokens_total\s+[1-9]/);
    assert.equal(JSON.parse(run(['status', '--json', ...at]).out).version, 1);
  });
  test('bench', () => {
    const r = run(['bench', ...at, '--clients', '1,2', '--requests', '1', '--max-tokens', '16', '--json']);
    assert.equal(r.code, 0, r.err);
    const rows = JSON.parse(r.out);
    assert.deepEqual(rows.map((x) => [x.clients, x.requests, x.tokens]), [[1, 1, 16], [2, 2, 32]]);
    assert.ok(rows.every((x) => x.tokens_per_second > 0 && x.first_ms_p50 > 0));
    assert.match(run(['bench', ...at, '--clients', '1', '--requests', '1', '--max-tokens', '8']).out, /clients +requests +tokens +tok\/s/);
  });
  test('chat in a pipe', () => {
    const r = run(['chat', ...at], { input: 'My name is Emma.\nWhat is my name?\n/clear\n/stats\n/nothing\n' });
    assert.equal(r.code, 0);
    assert.match(r.out, /Nice to meet you, Emma!\nYour name is Emma\.\nA new conversation\./);
    assert.match(r.out, /Unknown command \/nothing/);
  });
  test('chat on a terminal: editing, Ctrl-C stops the answer only, history, Ctrl-D', () => {
    const script = [
      ['> ', 'What is the capital of Norwaz\x7fy?\r'], ['Oslo.', ''],
      ['> ', '/clear\r'], ['new conversation', ''],
      ['> ', 'forgotten\x03'], ['> ', 'Hello!\r'], ['How can I help you?', ''],
      ['> ', '\x10\r'], ['How can I help you?', ''], // Ctrl-P: the line before
      ['> ', '\x04'],
    ];
    const r = spawnSync('/usr/bin/python3', [pty, JSON.stringify(script), islet, 'chat', ...at], { env: clean, encoding: 'utf8', timeout: 60000 * slow });
    assert.equal(r.status, 0, r.stdout + r.stderr);
    assert.match(readFileSync(`${dir}/chat_history`, 'utf8'), /Hello!/);
  });
  test('chat on a terminal: Ctrl-C in the middle of an answer', async () => {
    server.worker.kill('SIGSTOP');
    const script = [['> ', 'Tell me a story.\r'], ['reading the prompt', '\x03'], ['stopped', ''], ['> ', '/exit\r']];
    const r = spawnSync('/usr/bin/python3', [pty, JSON.stringify(script), islet, 'chat', ...at], { env: clean, encoding: 'utf8', timeout: 60000 * slow });
    server.worker.kill('SIGCONT');
    assert.equal(r.status, 0, r.stdout + r.stderr);
    await server.idle(2000);
  });
});

describe('up', () => {
  test('ready line, prefixed log, restarts, graceful Ctrl-C', async () => {
    const up = await (await new Up().start()).ready();
    try {
      assert.match(up.out, new RegExp(`^ready: http://127\\.0\\.0\\.1:${up.port}/v1 \\(model .*2048 tokens\\)\\n$`));
      assert.match(up.err, /^worker  \| /m);
      assert.match(up.err, /^gateway \| /m);
      const at = ['--server', up.server];
      assert.equal(run(['run', ...at, 'What is the capital of Norway?']).out, 'The capital of Norway is Oslo.\n');
      const second = run(['up', '--model', tinymoe, '--set', `server.listen=127.0.0.1:${up.port}`], { env: { RUNTIME_DIRECTORY: up.dir } });
      assert.equal(second.code, 75);
      assert.match(second.err, /runs already/);
      for (const name of ['isletd', 'islet-gateway']) {
        const old = up.children()[name];
        process.kill(old, 'SIGKILL');
        await until(`${name} again`, () => up.children()[name] && up.children()[name] !== old);
        await until('ready again', () => run(['status', ...at]).code === 0);
        assert.equal(run(['run', ...at, 'What is the capital of Norway?']).out, 'The capital of Norway is Oslo.\n');
      }
      assert.match(up.err, /worker ended by signal 9 .*starting it again in 50 ms/);
      const pids = Object.values(up.children());
      up.child.kill('SIGINT');
      assert.deepEqual(await up.exited, { code: 0, signal: null });
      assert.ok(pids.every((p) => !alive(p)));
    } finally {
      up.done();
    }
  });

  test('a worker that is asked to drain ends its answer, says so and is started again', async () => {
    const up = await (await new Up().start(['--set', `server.drain_deadline=${30 * slow} s`])).ready();
    try {
      const ask = (more) => fetch(`http://127.0.0.1:${up.port}/v1/chat/completions`, { method: 'POST', headers: { 'content-type': 'application/json' },
        body: JSON.stringify({ messages: [{ role: 'user', content: 'Tell me a story.' }], max_tokens: 400, ignore_eos: true, ...more }) });
      const old = up.children().isletd;
      const r = await ask({ stream: true, stream_options: { include_usage: true } });
      const frames = [];
      let text = '', asked;
      for await (const piece of r.body.pipeThrough(new TextDecoderStream())) {
        text += piece;
        if (!asked && text.includes('"content":"')) asked = drain(`${up.dir}/worker.sock`, frames);
      }
      assert.match(text, /data: \[DONE\]\n\n$/);
      const usage = text.split('\n\n').filter((l) => l.includes('"usage":{')).map((l) => JSON.parse(l.slice(6)).usage)[0];
      assert.equal(usage.completion_tokens, 400);
      assert.equal(usage.islet.resumed, 0, 'the old worker finished it');
      await asked;
      assert.equal(frames.at(-1).cmd, 0x89, 'drained comes last');
      const states = frames.filter((f) => f.cmd === 0x85).map((f) => f.payload[4]);
      assert.equal(states.at(-1), 2, 'draining');
      await until('another worker', () => up.children().isletd && up.children().isletd !== old);
      assert.match(up.err, /worker ended with status 0: starting it again in 50 ms/);
      const next = await (await ask({ max_tokens: 5 })).json();
      assert.equal(next.usage.completion_tokens, 5);
      assert.ok(!/^(worker|gateway) +\| error/m.test(up.err), up.err);
    } finally {
      up.child.kill('SIGTERM');
      await up.exited;
      up.done();
    }
  });

  test('killed hard, it leaves no orphan', async () => {
    const up = await (await new Up().start()).ready();
    const pids = Object.values(up.children());
    try {
      assert.equal(pids.length, 2);
      up.child.kill('SIGKILL');
      await until('both ended', () => pids.every((p) => !alive(p)), 10000);
    } finally {
      up.done();
    }
  });

  test('a second Ctrl-C does not wait', async () => {
    const up = await (await new Up().start()).ready();
    try {
      process.kill(up.children().isletd, 'SIGSTOP');
      const c = spawn(islet, ['run', '--server', up.server, 'Tell me a story.'], { env: clean });
      await sleep(200);
      up.child.kill('SIGINT');
      await until('it says so', () => up.err.includes('once more'));
      assert.equal(up.child.exitCode, null, 'still draining');
      up.child.kill('SIGINT');
      await until('the end', () => up.child.exitCode !== null, 5000);
      await new Promise((resolve) => (c.exitCode !== null ? resolve() : c.on('exit', resolve)));
    } finally {
      up.done();
    }
  });
});
