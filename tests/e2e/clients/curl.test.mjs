// W65 curl.
import test, { after, before } from 'node:test';
import { execFile, spawn } from 'node:child_process';
import { writeFileSync } from 'node:fs';
import path from 'node:path';
import { promisify } from 'node:util';
import { assert, ask, startServer, events, assemble } from './server.mjs';

const exec = promisify(execFile);
const curl = async (...args) => (await exec('curl', ['-sS', '--max-time', '60', ...args], { encoding: 'buffer', maxBuffer: 1 << 26 })).stdout;

let server;
before(async () => { server = await startServer(); });
after(() => server?.stop());

const question = JSON.stringify(ask('What is the capital of Norway?'));
const answer = 'The capital of Norway is Oslo.';

test('W65 JSON, with curl -d as people type it', async () => {
  const r = JSON.parse(await curl(`${server.v1}/chat/completions`, '-d', question));
  assert.equal(r.choices[0].message.content, answer);
  const typed = JSON.parse(await curl(`${server.v1}/chat/completions`, '-H', 'Content-Type: application/json', '-d', question));
  assert.equal(typed.choices[0].message.content, answer);
});

test('W65 -N stream', async () => {
  const out = await curl('-N', `${server.v1}/chat/completions`, '-d', JSON.stringify({ ...JSON.parse(question), stream: true }));
  const e = events(out);
  assert.equal(e.done, 1);
  assert.equal(assemble(e.list).content, answer);
});

test('W65 --unix-socket', async () => {
  const r = JSON.parse(await curl('--unix-socket', server.socket, 'http://x/v1/models'));
  assert.equal(r.object, 'list');
});

test('W65 a body of 2 MiB goes through 100-continue without its one second of waiting', async () => {
  const file = path.join(server.dir, 'body.json');
  writeFileSync(file, JSON.stringify({ content: 'ab '.repeat(700000) }));
  const out = (await curl('-o', '/dev/null', '-w', '%{http_code} %{time_total}', '-H', 'Content-Type: application/json', '-H', 'Expect: 100-continue',
    `${server.base}/tokenize`, '--data-binary', `@${file}`)).toString();
  const [code] = out.split(' ');
  assert.equal(code, '200');
  const verbose = (await exec('curl', ['-sS', '-v', '-o', '/dev/null', '-H', 'Content-Type: application/json', '-H', 'Expect: 100-continue', `${server.base}/tokenize`, '--data-binary', `@${file}`])).stderr;
  assert.match(verbose, /< HTTP\/1\.1 100 Continue/);
  assert.doesNotMatch(verbose, /Done waiting for 100-continue/, 'curl waited until it had enough');
});

test('W65 a curl that is ended ends the work', async () => {
  const long = JSON.stringify({ ...ask('Tell me a story.'), ignore_eos: true, max_tokens: 1900, stream: true });
  const c = spawn('curl', ['-sSN', `${server.v1}/chat/completions`, '-d', long]);
  await new Promise((resolve) => c.stdout.once('data', resolve));
  c.kill();
  await server.idle(1000);
});

test('W65 an error keeps its body', async () => {
  const r = JSON.parse(await curl(`${server.v1}/nothing`));
  assert.equal(r.error.code, 'unknown_url');
});
