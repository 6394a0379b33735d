// A worker that may die: killed at every token of an answer, the text stays that of an undisturbed run.
import test, { describe, before, after } from 'node:test';
import { assert, ask, chat, rawPost, startServer, stream } from '../clients/server.mjs';

const N = 40;
const base = { max_tokens: N, ignore_eos: true };
const greedy = ask('How do I make pancakes?', base);
const sampled = ask('Tell me a story.', { ...base, temperature: 1, seed: 9, top_p: 0.95, frequency_penalty: 0.3 });
const cases = [['greedy', greedy], ['sampled', sampled]];

let server;
const plain = new Map();
before(async () => {
  server = await startServer();
  for (const [name, body] of cases) plain.set(name, (await chat(server, { ...body, logprobs: true })).json.choices[0]);
});
after(() => server?.stop());

// Points that every answer of the sweep passes.
const sure = /^engine\.token|^worker\.admit:1$|^worker\.done:1$|^engine\.prefill:1$/;

// One server for the sweep: the worker is started with the next crash point each time.
async function sweep(s, points, run) {
  for (const point of points) {
    s.worker.wanted = false;
    if (s.worker.alive) await s.worker.kill('SIGTERM');
    s.worker.wanted = true;
    const starts = s.worker.starts;
    s.worker.start({ ISLET_CRASH_AT: point });
    await s.waitReady();
    await run(point);
    // A frame may hold several tokens and a step several prompts: such a point may lie behind the end.
    if (sure.test(point)) await s.until(`${point}: the worker died once`, () => s.worker.starts === starts + 2, 3000);
  }
}

describe('kill -9 at every token', () => {
  let s;
  before(async () => { s = await startServer(); });
  after(() => s?.stop());

  for (const [name, body] of cases) {
    test(`${name}, streamed and not`, async () => {
      const wanted = plain.get(name).message.content;
      const points = Array.from({ length: N }, (_, k) => `${k % 2 ? 'worker.sent' : 'engine.token'}:${k + 1}`);
      let i = 0;
      const resumed = (usage, point) => assert.ok(usage.islet.resumed === 1 || (usage.islet.resumed === 0 && !sure.test(point)), point);
      await sweep(s, points, async (point) => {
        if (i++ % 2) {
          const r = await chat(s, body);
          assert.equal(r.content, wanted, point);
          assert.equal(r.json.usage.completion_tokens, N);
          resumed(r.json.usage, point);
        } else {
          const r = await stream(s, { ...body, stream_options: { include_usage: true } });
          assert.equal(r.content, wanted, point);
          resumed(r.usage, point);
        }
      });
    });
  }

  test('in prefill, at admission and at the end', async () => {
    const wanted = plain.get('greedy').message.content;
    await sweep(s, ['engine.prefill:1', 'worker.admit:1', 'engine.layer:2', 'worker.done:1'], async (point) => {
      assert.equal((await stream(s, greedy)).content, wanted, point);
    });
  });

  test('four streams at once', async () => {
    const bodies = [greedy, sampled, { ...greedy, logprobs: true }, { ...sampled, logprobs: true }];
    await sweep(s, ['engine.token:3', 'engine.token:50', 'engine.token:101', 'worker.sent:77', 'engine.prefill:2'], async (point) => {
      const all = await Promise.all(bodies.map((b, i) => (i % 2 ? chat(s, b).then((r) => ({ content: r.content, logprobs: r.json.choices[0].logprobs?.content })) : stream(s, b))));
      all.forEach((r, i) => {
        const expected = plain.get(i % 2 ? 'sampled' : 'greedy');
        assert.equal(r.content, expected.message.content, `${point}, stream ${i}`);
        if (i >= 2) assert.deepEqual(r.logprobs, expected.logprobs.content, `${point}, stream ${i}: bits of the logprobs`);
      });
    });
  });
});

test('killed again and again: one text', async () => {
  const s = await startServer({ restart: true });
  try {
    let kills = 0;
    const r = await rawPost(s, '/v1/chat/completions', { ...greedy, max_tokens: 600, stream: true, stream_options: { include_usage: true } }, {
      onData: (d) => { if (d.includes('"content":"') && s.worker.alive && kills < 5) { kills++; s.worker.kill(); } } });
    const { events, assemble } = await import('../clients/server.mjs');
    const got = assemble(events(r.body).list);
    const undisturbed = await chat(server, { ...greedy, max_tokens: 600 });
    assert.equal(undisturbed.status, 200, undisturbed.body.toString());
    assert.equal(got.content, undisturbed.content);
    assert.ok(got.usage.islet.resumed >= 1, `${got.usage.islet.resumed} times resumed`);
  } finally {
    await s.stop();
  }
});

test('another model behind the socket ends the request, and is not continued', async () => {
  const { thinkModel } = await import('../clients/server.mjs');
  const s = await startServer({ restart: false, set: { 'worker.resume_deadline': '20 s' }, allow: [/./] });
  try {
    let killed;
    const r = await rawPost(s, '/v1/chat/completions', { ...greedy, max_tokens: 1500, stream: true }, {
      onData: (d) => {
        if (!d.includes('"content":"') || killed) return;
        killed = s.worker.kill().then(() => {
          s.worker.args = s.worker.args.map((a) => (a.startsWith('model.path=') ? `model.path=${thinkModel()}` : a));
          s.worker.start();
        });
      } });
    const { events, assemble } = await import('../clients/server.mjs');
    const got = assemble(events(r.body).list);
    assert.ok(got.error, 'an error event');
    assert.match(got.error.code, /model_error|worker_unavailable/);
    assert.ok(!got.content.includes('forty'));
  } finally {
    await s.stop();
  }
});
