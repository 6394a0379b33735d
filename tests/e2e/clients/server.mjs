// A real server for one test file: isletd and islet-gateway with a runtime directory and ports of their own.
// The worker is started again when it dies, as `islet up` does; stop() ends both and looks at their logs.
import { spawn, execFileSync } from 'node:child_process';
import { mkdtempSync, rmSync, existsSync } from 'node:fs';
import { STATUS_CODES } from 'node:http';
import { createServer, createConnection } from 'node:net';
import { setTimeout as sleep } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';
import path from 'node:path';
import assert from 'node:assert/strict';

export const root = fileURLToPath(new URL('../../..', import.meta.url));
export const bin = path.resolve(root, process.env.B ?? 'build', 'bin');
export const tinymoe = path.join(root, 'tests/models/tinymoe-q8_0.gguf');

// Sanitised and debug builds are slower: limits of time are multiplied by this.
export const slow = /san-|debug/.test(process.env.B ?? '') ? 10 : 1;
export const sanitised = /san-/.test(process.env.B ?? '');

// Path of the generated model that thinks, made once for a build.
export function thinkModel() {
  const file = path.join(bin, '..', 'think.gguf');
  if (!existsSync(file)) execFileSync(path.join(bin, 'mkthink'), [file]);
  return file;
}

// The same with a chat template that raises on a wrong order of roles.
export function strictModel() {
  const file = path.join(bin, '..', 'strict.gguf');
  if (!existsSync(file)) execFileSync(path.join(bin, 'mkthink'), [file, 'strict']);
  return file;
}

function portOf(host) {
  return new Promise((resolve) => {
    const s = createServer();
    s.on('error', () => resolve(0));
    s.listen(0, host, () => {
      const { port } = s.address();
      s.close(() => resolve(port));
    });
  });
}

export async function freePort() {
  return portOf('127.0.0.1');
}

// What makes a log line a fault of the test: its level is error, or a sanitiser reports.
const isError = (line) => /^error |==ERROR: |WARNING: ThreadSanitizer|: runtime error: /.test(line);

class Process {
  constructor(server, name, program, args) {
    Object.assign(this, { server, name, program, args, lines: [], starts: 0, wanted: true });
  }

  start(extraEnv = {}) {
    clearTimeout(this.again); // a start by hand must not be followed by a second worker
    this.starts++;
    this.killed = false;
    const env = { ...this.server.env, ...extraEnv };
    const child = spawn(path.join(bin, this.program), this.args, { env, stdio: ['ignore', 'pipe', 'pipe'] });
    this.child = child;
    let rest = '';
    const onData = (data) => {
      const parts = (rest + data).split('\n');
      rest = parts.pop();
      for (const line of parts) {
        this.lines.push(line);
        if (process.env.SHOW_LOGS) console.error(`${this.name} | ${line}`);
      }
    };
    child.stdout.setEncoding('utf8').on('data', onData);
    child.stderr.setEncoding('utf8').on('data', onData);
    this.exited = new Promise((resolve) => {
      child.on('error', (e) => resolve({ code: null, signal: null, error: e }));
      child.on('exit', (code, signal) => {
        this.status = { code, signal };
        resolve(this.status);
        if (this.wanted && this.server.restart) this.again = setTimeout(() => this.wanted && this.start(), 50);
      });
    });
    return child;
  }

  get pid() {
    return this.child?.pid;
  }

  get alive() {
    return this.child != null && this.child.exitCode === null && this.child.signalCode === null;
  }

  kill(signal = 'SIGKILL') {
    if (signal === 'SIGKILL') this.killed = true;
    if (this.alive) this.child.kill(signal);
    return this.exited;
  }
}

export class Server {
  constructor(options) {
    Object.assign(this, { model: tinymoe, set: {}, workerEnv: {}, restart: true, ready: true, startWorker: true, allow: [] }, options);
  }

  async start() {
    this.dir = mkdtempSync('/tmp/islet-test-');
    this.socket = path.join(this.dir, 'http.sock');
    this.port = await freePort();
    this.env = { ...process.env, RUNTIME_DIRECTORY: this.dir, STATE_DIRECTORY: this.dir };
    delete this.env.ISLET_CRASH_AT;
    this.hasV6 = (await portOf('::1')) !== 0;
    const settings = {
      'model.path': this.model,
      'server.listen': `127.0.0.1:${this.port}${this.hasV6 ? `, [::1]:${this.port}` : ''}`,
      'compute.threads': '2',
      ...this.set,
    };
    const args = Object.entries(settings).flatMap(([k, v]) => ['--set', `${k}=${v}`]);
    this.worker = new Process(this, 'worker', 'isletd', args);
    this.gateway = new Process(this, 'gateway', 'islet-gateway', args);
    if (this.startWorker) this.worker.start(this.workerEnv);
    this.gateway.start();
    this.base = `http://127.0.0.1:${this.port}`;
    this.v1 = `${this.base}/v1`;
    await this.until('the gateway listens', async () => (await this.get('/livez').catch(() => null))?.status === 200);
    if (this.ready) await this.waitReady();
    return this;
  }

  // Waits for a condition, with a limit. Not a sleep to synchronise: it ends when the event is there.
  async until(what, condition, ms = 30000) {
    const end = Date.now() + ms * slow;
    for (;;) {
      const value = await condition();
      if (value) return value;
      if (!this.gateway.alive) {
        throw new Error(`${what}: the gateway ended (${JSON.stringify(this.gateway.status)})\n${this.logText()}`);
      }
      if (Date.now() > end) throw new Error(`not within ${ms} ms: ${what}\n${this.logText()}`);
      await sleep(15);
    }
  }

  waitReady(ms = 60000) {
    return this.until('ready', async () => (await this.get('/readyz')).status === 200, ms);
  }

  connect() {
    return createConnection(this.port, '127.0.0.1');
  }

  get(pathname, headers = {}) {
    return fetch(this.base + pathname, { headers, signal: AbortSignal.timeout(10000) });
  }

  async status() {
    return (await this.get('/status')).json();
  }

  async metrics() {
    return parseMetrics(await (await this.get('/metrics')).text());
  }

  // The server holds no request and no KV page of one.
  async idle(ms = 5000) {
    await this.until('idle', async () => {
      const s = await this.status();
      return s.worker?.sequences_running === 0 && s.worker?.sequences_waiting === 0 && s.worker?.kv_pages_used === 0;
    }, ms);
  }

  async post(pathname, body, headers = {}) {
    return fetch(this.base + pathname, {
      method: 'POST',
      headers: { 'content-type': 'application/json', ...headers },
      body: typeof body === 'string' || body instanceof Uint8Array ? body : JSON.stringify(body),
    });
  }

  logText() {
    return [...this.worker.lines.map((l) => `worker  | ${l}`), ...this.gateway.lines.map((l) => `gateway | ${l}`)].slice(-60).join('\n');
  }

  async stop({ checkLogs = true } = {}) {
    this.worker.wanted = this.gateway.wanted = false;
    let live = null; // whatever a test did, its server still serves
    if (checkLogs && this.gateway.alive && !this.gateway.killed && !this.gateway.lines.some((l) => l.includes('draining'))) live = await this.get('/livez').then((r) => r.status, (e) => e.message);
    const end = async (p) => {
      if (!p.alive) return;
      p.kill('SIGCONT');
      p.kill('SIGTERM');
      // The timer must not keep this process when the end comes sooner.
      const ended = await Promise.race([p.exited, sleep(20000 * slow, false, { ref: false })]);
      if (!ended) {
        await p.kill('SIGKILL');
        throw new Error(`${p.name} did not end within 20 s of SIGTERM\n${this.logText()}`);
      }
      if (!p.killed) assert.deepEqual(p.status, { code: 0, signal: null }, `${p.name}'s end\n${this.logText()}`);
    };
    try {
      await end(this.gateway).finally(() => end(this.worker));
    } finally {
      rmSync(this.dir, { recursive: true, force: true });
    }
    if (live !== null) assert.equal(live, 200, `/livez at the end\n${this.logText()}`);
    if (checkLogs) {
      const bad = [...this.worker.lines, ...this.gateway.lines].filter((l) => isError(l) && !this.allow.some((r) => r.test(l)));
      assert.deepEqual(bad, [], 'errors in the logs');
    }
  }
}

export async function startServer(options = {}) {
  const server = new Server(options);
  try {
    return await server.start();
  } catch (e) {
    await server.stop({ checkLogs: false }).catch(() => {});
    throw e;
  }
}

// The text format of Prometheus: of each family one HELP and one TYPE in front of its samples and these together; no sample
// twice; what ends in _total is a counter and every counter does.
export function parseMetrics(text) {
  const values = new Map(), types = new Map();
  let family = '', helped = '';
  assert.ok(text.endsWith('\n'), 'the last line is whole');
  for (const line of text.split('\n').slice(0, -1)) {
    const about = /^# (HELP|TYPE) ([a-zA-Z_:][a-zA-Z0-9_:]*) (.+)$/.exec(line);
    if (about?.[1] === 'HELP') {
      helped = about[2];
      assert.ok(!types.has(helped), `a second HELP: ${line}`);
      assert.doesNotMatch(about[3], /\\(?![\\n])/, line);
    } else if (about) {
      family = about[2];
      assert.ok(family === helped && !types.has(family), `TYPE without its HELP, or a second one: ${line}`);
      assert.match(about[3], /^(counter|gauge|histogram|summary|untyped)$/, line);
      assert.equal(family.endsWith('_total'), about[3] === 'counter', line);
      types.set(family, about[3]);
    } else {
      const m = /^([a-zA-Z_:][a-zA-Z0-9_:]*)(\{[^}]*\})? (-?[0-9.eE+-]+|NaN|[+-]Inf)$/.exec(line);
      assert.ok(m, `not a line of Prometheus text: ${JSON.stringify(line)}`);
      assert.equal(m[1], family, `a sample outside of its family: ${line}`);
      assert.ok(!values.has(m[1] + (m[2] ?? '')), `a second sample: ${line}`);
      values.set(m[1] + (m[2] ?? ''), Number(m[3]));
    }
  }
  return values;
}

// Every error code with its status and type.
const errors = {
  invalid_json: [400], invalid_type: [400], invalid_value: [400], missing_field: [400], unsupported_parameter: [400], unsupported_content: [400],
  context_length_exceeded: [400], bad_request: [400], uri_too_long: [414], head_too_large: [431], expectation_failed: [417], not_implemented: [501],
  http_version: [505], invalid_api_key: [401, 'authentication_error'], host_not_allowed: [403, 'permission_error'], origin_not_allowed: [403, 'permission_error'],
  unknown_url: [404], model_not_found: [404], not_found: [404], method_not_allowed: [405], request_timeout: [408], body_too_large: [413],
  unsupported_media_type: [415], overloaded: [503, 'overloaded_error'], worker_unavailable: [503, 'server_error'], configuration: [503, 'server_error'],
  model_error: [500, 'server_error'], internal_error: [500, 'server_error'],
};

// What holds of every response, whatever was asked.
function checkResponse(r, isHead) {
  const what = `${r.status} ${JSON.stringify(r.headers)} ${r.body.toString().slice(0, 300)}`;
  assert.match(r.headers['x-request-id'] ?? '', /^[A-Za-z0-9._:-]{1,128}$/, what);
  assert.ok(r.reason === (r.status === 413 ? 'Content Too Large' : STATUS_CODES[r.status]), `${r.reason} ${what}`);
  assert.equal('retry-after' in r.headers, r.status === 503, what);
  assert.equal('www-authenticate' in r.headers, r.status === 401, what);
  if (r.status === 503) assert.match(r.headers['retry-after'], /^([1-9]|[12][0-9]|30)$/, what);
  if (r.status === 405) assert.ok(r.headers.allow, what);
  if (r.status < 400 || isHead || !r.complete) return;
  assert.equal(r.headers['content-type'], 'application/json', what);
  const { error } = JSON.parse(r.body);
  assert.deepEqual(Object.keys(error).slice(0, 4), ['message', 'type', 'param', 'code'], what);
  const [status, type = 'invalid_request_error'] = errors[error.code] ?? [];
  if (JSON.parse(r.body).status === undefined) assert.equal(r.status, status, what); // /readyz is 503 whatever the reason
  assert.equal(error.type, type, what);
  assert.ok(typeof error.message === 'string' && error.message.length > 0 && !error.message.includes('\n'), what);
  assert.ok(error.param === null || typeof error.param === 'string', what);
}

// One exchange over a raw socket. Resolves with what came, also when the connection broke.
//   complete: the whole body came (Content-Length or zero chunk); ended: the server closed
export function raw(server, bytes, { unix = false, onData, keepOpen = false, timeout = 60000, writeEnd = false } = {}) {
  return new Promise((resolve, reject) => {
    const c = unix ? createConnection(server.socket) : createConnection(server.port, '127.0.0.1');
    let all = Buffer.alloc(0);
    const times = [];
    const start = performance.now();
    const finish = (ended) => {
      clearTimeout(timer);
      if (!keepOpen) c.destroy();
      const r = parseResponse(all);
      try {
        if (r.status !== 0) checkResponse(r, Buffer.from(bytes).subarray(0, 5).equals(Buffer.from('HEAD ')));
      } catch (e) {
        return reject(e);
      }
      resolve({ ...r, ended, times, connection: c, raw: all });
    };
    const timer = setTimeout(() => { c.destroy(); reject(new Error(`no whole response within ${timeout} ms; got ${JSON.stringify(all.toString('latin1').slice(0, 400))}`)); }, timeout * slow);
    c.on('error', () => finish(true));
    c.on('close', () => finish(true));
    c.on('connect', () => { c.write(bytes); if (writeEnd) c.end(); });
    c.on('data', (d) => {
      times.push({ at: performance.now() - start, from: all.length, n: d.length });
      all = Buffer.concat([all, d]);
      onData?.(d, c, all);
      if (all.subarray(0, 10).equals(Buffer.from('HTTP/1.1 1')) && !/\r\nexpect:/i.test(Buffer.from(bytes).toString('latin1'))) {
        clearTimeout(timer);
        c.destroy();
        reject(new Error('a 1xx that nobody asked for'));
        return;
      }
      if (parseResponse(all).complete) finish(false);
    });
  });
}

export function parseResponse(all) {
  const end = all.indexOf('\r\n\r\n');
  if (end < 0) return { complete: false, status: 0, headers: {}, body: Buffer.alloc(0) };
  const lines = all.subarray(0, end).toString('latin1').split('\r\n');
  const status = Number(lines[0].split(' ')[1]), reason = lines[0].slice(13);
  const headers = {};
  for (const l of lines.slice(1)) headers[l.slice(0, l.indexOf(':')).toLowerCase()] = l.slice(l.indexOf(':') + 1).trim();
  let rest = all.subarray(end + 4);
  if (status >= 100 && status < 200) return parseResponse(rest);
  if (headers['transfer-encoding'] === 'chunked') {
    const parts = [];
    for (;;) {
      const eol = rest.indexOf('\r\n');
      if (eol < 0) return { complete: false, status, reason, headers, body: Buffer.concat(parts), chunks: parts };
      const n = parseInt(rest.subarray(0, eol).toString('latin1'), 16);
      if (n === 0) return { complete: rest.length >= eol + 4, status, reason, headers, body: Buffer.concat(parts), chunks: parts, headSize: end + 4 };
      if (rest.length < eol + 2 + n + 2) return { complete: false, status, reason, headers, body: Buffer.concat(parts), chunks: parts };
      parts.push(rest.subarray(eol + 2, eol + 2 + n));
      rest = rest.subarray(eol + 2 + n + 2);
    }
  }
  const n = status === 204 ? 0 : Number(headers['content-length'] ?? NaN);
  if (Number.isNaN(n)) return { complete: false, status, reason, headers, body: rest };
  return { complete: rest.length >= n, status, reason, headers, body: rest.subarray(0, n), headSize: end + 4 };
}

export function httpBytes(method, pathname, body, headers = {}) {
  const data = body === undefined ? null : Buffer.isBuffer(body) ? body : Buffer.from(typeof body === 'string' ? body : JSON.stringify(body));
  const h = { Host: 'localhost', ...(data ? { 'Content-Type': 'application/json', 'Content-Length': data.length } : {}), ...headers };
  const head = `${method} ${pathname} HTTP/1.1\r\n${Object.entries(h).map(([k, v]) => `${k}: ${v}\r\n`).join('')}\r\n`;
  return Buffer.concat([Buffer.from(head, 'latin1'), data ?? Buffer.alloc(0)]);
}

// Events of a stream body: objects of `data:` lines, and the comments between them.
export function events(body) {
  const text = new TextDecoder('utf-8', { fatal: true }).decode(body);
  const list = [];
  let comments = 0, done = 0;
  assert.ok(!text.includes('\r'), 'LF only');
  assert.ok(text === '' || text.endsWith('\n\n'), 'the last event is whole');
  for (const block of text.split('\n\n')) {
    if (block === '') continue;
    if (block === ':') { comments++; continue; }
    assert.match(block, /^data: [^\n]*$/, 'one data line per event');
    const data = block.slice(6);
    if (data === '[DONE]') { done++; continue; }
    assert.equal(done, 0, 'nothing behind [DONE]');
    list.push(JSON.parse(data));
  }
  return { list, comments, done };
}

// Text of choice `index`: {content, reasoning, finish, text, error, usage}
export function assemble(list, index = 0) {
  const r = { content: '', reasoning: '', text: '', finish: null, stopReason: null, roles: 0, finishes: 0, error: null, usage: null, logprobs: [], tokens: [] };
  for (const e of list) {
    if (e.error) { r.error = e.error; continue; }
    if (e.usage) r.usage = e.usage;
    if (e.timings) r.timings = e.timings;
    for (const c of e.choices ?? []) {
      if (c.index !== index) continue;
      if (c.delta?.role) r.roles++;
      r.content += c.delta?.content ?? '';
      r.reasoning += c.delta?.reasoning_content ?? '';
      r.text += c.text ?? '';
      if (c.logprobs?.content) r.logprobs.push(...c.logprobs.content);
      if (c.tokens) r.tokens.push(...c.tokens);
      if (c.finish_reason) { r.finish = c.finish_reason; r.finishes++; r.stopReason = c.stop_reason; }
    }
  }
  return r;
}

export async function rawPost(server, pathname, body, { headers, ...options } = {}) {
  return raw(server, httpBytes('POST', pathname, body, headers), options);
}

export async function chat(server, fields, { path: pathname = '/v1/chat/completions', headers } = {}) {
  const r = await rawPost(server, pathname, fields, { headers });
  let json = null;
  try { json = JSON.parse(r.body.toString('utf8')); } catch { /* left to the caller */ }
  return { ...r, json, content: json?.choices?.[0]?.message?.content ?? json?.choices?.[0]?.text };
}

export async function stream(server, fields, options = {}) {
  const r = await rawPost(server, options.path ?? '/v1/chat/completions', { ...fields, stream: true }, options);
  if (r.status !== 200) return { ...r, json: JSON.parse(r.body.toString('utf8')) };
  const e = events(r.body);
  return { ...r, ...e, ...assemble(e.list) };
}

export const ask = (text, extra = {}) => ({ messages: [{ role: 'user', content: text }], temperature: 0, ...extra });
export { sleep, assert };
