// What the gateway says of its settings: at the start, at SIGHUP, and when another one is there already.
import test, { after, before } from 'node:test';
import { spawnSync } from 'node:child_process';
import { mkdirSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import path from 'node:path';
import { assert, bin, startServer, tinymoe } from '../clients/server.mjs';

let server, file;
const conf = (server_, worker = '') =>
  writeFileSync(file, `[model]\npath = ${tinymoe}\n[server]\n${server_}\n[worker]\n${worker}\n`);
const run = (...args) => {
  const r = spawnSync(path.join(bin, 'islet-gateway'), args, { encoding: 'utf8', timeout: 20000, env: server.env });
  return { code: r.status, text: r.stderr };
};

before(async () => {
  server = await startServer();
  file = path.join(server.dir, 'other.conf');
});
after(() => server?.stop());

for (const key of ['worker.socket', 'server.socket']) {
  test(`${key} too long: one line with the limit`, () => {
    const r = run('--set', `model.path=${tinymoe}`, '--set', `${key}=/tmp/${'x'.repeat(150)}`);
    assert.equal(r.code, 78);
    assert.match(r.text, new RegExp(`^islet-gateway: ${key} .*155 bytes.*107[^\n]*\n$`));
  });
}

for (const [line, right] of [['hosts = a b,c', 'a, b'], ['cors = https://a https://b', 'https://a, https://b'],
  ['listen = 127.0.0.1:1 127.0.0.1:2', '127.0.0.1:1, 127.0.0.1:2']]) {
  test(`${line}: refused with its place and what would be right`, () => {
    conf(line);
    const r = run('--check-config', file);
    assert.equal(r.code, 78);
    assert.ok(r.text.includes(`${file}:4`) && r.text.trimEnd().endsWith(`: ${right}`), r.text);
  });
}

test('lists with commas and blanks around them are fine', () => {
  conf('hosts = a , b,c\ncors = https://a,https://b\nlisten = 127.0.0.1:1, [::1]:1');
  assert.deepEqual(run('--check-config', file), { code: 0, text: '' });
});

test('the line of a second gateway names the first one', () => {
  const name = `islet-gateway (pid ${server.gateway.pid})`;
  const tcp = run('--set', `model.path=${tinymoe}`, '--set', `server.listen=127.0.0.1:${server.port}`, '--set', 'server.socket=off');
  assert.ok(tcp.code === 71 && tcp.text.includes(`in use by ${name}; stop it or change server.listen`), tcp.text);
  const unix = run('--set', `model.path=${tinymoe}`, '--set', 'server.listen=none');
  assert.ok(unix.code === 75 && unix.text.includes(`served by ${name}; stop it or change server.socket`), unix.text);
});

test('a value that needs a restart is told as long as it differs from the one in force', async () => {
  const home = mkdtempSync('/tmp/islet-test-');
  const conf2 = path.join(home, 'islet', 'islet.conf');
  mkdirSync(path.dirname(conf2));
  writeFileSync(conf2, '[worker]\n');
  process.env.XDG_CONFIG_HOME = home;
  const own = await startServer({ startWorker: false, ready: false });
  delete process.env.XDG_CONFIG_HOME;
  const pending = async (text) => {
    const n = own.gateway.lines.length;
    writeFileSync(conf2, text);
    own.gateway.child.kill('SIGHUP');
    await own.until('reloaded', () => own.gateway.lines.slice(n).some((l) => /settings reloaded/.test(l)));
    return own.gateway.lines.slice(n).filter((l) => /needs_restart/.test(l)).length;
  };
  try {
    assert.equal(await pending('[worker]\nmax_frame = 8MiB\n'), 1);
    assert.equal(await pending('[worker]\nmax_frame = 8MiB\n'), 1);
    assert.equal(await pending('[worker]\n'), 0);
    assert.equal(await pending('[server]\nqueue = 9\n'), 0);
  } finally {
    await own.stop();
    rmSync(home, { recursive: true, force: true });
  }
});
