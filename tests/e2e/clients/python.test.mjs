// W66 and row 17: Python's requests and httpx (Debian's packages) in python_clients.py.
import test from 'node:test';
import { execFile } from 'node:child_process';
import { fileURLToPath } from 'node:url';
import { promisify } from 'node:util';
import { assert, startServer, thinkModel } from './server.mjs';

const exec = promisify(execFile);
const script = fileURLToPath(new URL('python_clients.py', import.meta.url));

test('W66 requests and httpx; row 17 U+2028 breaks no reader', async () => {
  const server = await startServer();
  const think = await startServer({ model: thinkModel() });
  try {
    const { stdout } = await exec('/usr/bin/python3', [script, server.base, think.base]);
    assert.equal(JSON.parse(stdout), 'say "hi\\\x01\x7f\x85\u2028\u2029<tab>\t</x>end');
    await server.idle(1000);
  } finally {
    await server.stop();
    await think.stop();
  }
});
