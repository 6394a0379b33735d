// W62 and the rows of "what real clients trip over" that name openai.
import test, { after, before, describe } from 'node:test';
import OpenAI from 'openai';
import { assert, ask, startServer, sleep, thinkModel } from './server.mjs';

let server, client;
before(async () => {
  server = await startServer();
  client = new OpenAI({ baseURL: server.v1, apiKey: 'any', maxRetries: 0 });
});
after(() => server?.stop());

const norway = ask('What is the capital of Norway?');
const create = (extra = {}, options) => client.chat.completions.create({ model: 'default', ...norway, ...extra }, options);

// fetch that counts attempts.
function counted(options = {}) {
  const counter = { attempts: 0 };
  const c = new OpenAI({ baseURL: server.v1, apiKey: 'any', fetch: (...a) => { counter.attempts++; return fetch(...a); }, ...options });
  return [c, counter];
}

async function text(streaming) {
  let t = '';
  for await (const e of streaming) t += e.choices[0]?.delta?.content ?? '';
  return t;
}

describe('W62 openai', () => {
  test('create answers', async () => {
    const r = await create();
    assert.equal(r.choices[0].message.content, 'The capital of Norway is Oslo.');
    assert.equal(r.choices[0].finish_reason, 'stop');
    assert.equal(r.object, 'chat.completion');
    assert.match(r.id, /^chatcmpl-[A-Za-z0-9]{24}$/);
    assert.equal(r.usage.total_tokens, r.usage.prompt_tokens + r.usage.completion_tokens);
    assert.ok(r._request_id);
  });

  test('.stream() gives the same text and a final completion', async () => {
    const s = client.chat.completions.stream({ model: 'default', ...norway });
    let deltas = '';
    s.on('content', (d) => { deltas += d; });
    const final = await s.finalChatCompletion();
    assert.equal(deltas, 'The capital of Norway is Oslo.');
    assert.equal(final.choices[0].message.content, deltas);
    assert.equal(final.choices[0].finish_reason, 'stop');
  });

  test('.parse() with the text format', async () => {
    const r = await client.chat.completions.parse({ model: 'default', ...norway, response_format: { type: 'text' } });
    assert.equal(r.choices[0].message.content, 'The capital of Norway is Oslo.');
    assert.equal(r.choices[0].message.parsed, null);
  });

  test('models.list and retrieve', async () => {
    const list = await client.models.list();
    assert.equal(list.data.length, 1);
    const one = await client.models.retrieve(list.data[0].id);
    assert.equal(one.id, list.data[0].id);
    assert.equal(one.max_model_len, 2048);
    await assert.rejects(client.models.retrieve('org/absent:1'), OpenAI.NotFoundError);
  });

  test('completions, also streamed', async () => {
    const body = { model: 'default', prompt: 'The sun', max_tokens: 8, temperature: 0 };
    const r = await client.completions.create(body);
    assert.match(r.id, /^cmpl-/);
    let streamed = '';
    for await (const e of await client.completions.create({ ...body, stream: true })) streamed += e.choices[0]?.text ?? '';
    assert.equal(streamed, r.choices[0].text);
  });

  test('a message that was told can be sent back as it is', async () => {
    const next = { role: 'user', content: 'Hello!' };
    const wanted = (await create({ messages: [...norway.messages, { role: 'assistant', content: 'The capital of Norway is Oslo.' }, next] })).choices[0].message;
    const told = (await create()).choices[0].message;
    const streamed = await client.chat.completions.stream({ model: 'default', ...norway }).finalMessage();
    for (const message of [told, streamed, { ...told, annotations: [], audio: null, function_call: null }, { role: 'assistant', content: null, refusal: told.content }])
      assert.deepEqual((await create({ messages: [...norway.messages, message, next] })).choices[0].message, wanted, JSON.stringify(message));
    for (const key of ['function_call', 'audio'])
      await assert.rejects(create({ messages: [...norway.messages, { role: 'assistant', content: null, [key]: { id: 'a', name: 'f', arguments: '{}' } }, next] }),
        (e) => e.status === 400 && e.code === 'unsupported_content' && e.param === `messages[1].${key}`);
  });

  test('every optional field as null is the answer without it', async () => {
    const names = ['frequency_penalty', 'logit_bias', 'logprobs', 'max_completion_tokens', 'max_tokens', 'metadata', 'modalities', 'n', 'presence_penalty', 'reasoning_effort', 'seed',
      'service_tier', 'stop', 'store', 'stream', 'stream_options', 'top_logprobs', 'top_p', 'verbosity', 'prediction', 'audio', 'tools', 'tool_choice', 'parallel_tool_calls',
      'response_format', 'functions', 'function_call', 'user', 'web_search_options', 'prompt_cache_key', 'safety_identifier'];
    const { data, response } = await create(Object.fromEntries(names.map((n) => [n, null]))).withResponse();
    assert.equal(data.choices[0].message.content, 'The capital of Norway is Oslo.');
    assert.equal(response.headers.get('x-islet-ignored'), null);
  });

  test('several streamed choices with logprobs come together again', async () => {
    const extra = { n: 2, logprobs: true, top_logprobs: 2, temperature: 1, seed: 5, max_tokens: 12 };
    const json = await create(extra);
    const s = await client.chat.completions.stream({ model: 'default', ...norway, ...extra }).finalChatCompletion();
    for (const i of [0, 1]) {
      assert.equal(s.choices[i].message.content, json.choices[i].message.content);
      assert.deepEqual(s.choices[i].logprobs.content, json.choices[i].logprobs.content);
      assert.equal(s.choices[i].finish_reason, json.choices[i].finish_reason);
    }
  });

  test('what is not served is told once, with its name', async () => {
    const [c, counter] = counted();
    const tool = { type: 'function', function: { name: 'f', parameters: { type: 'object', properties: {} } } };
    for (const [call, status, part] of [[() => c.responses.create({ model: 'default', input: 'hi' }), 404, '/v1/responses'], [() => c.embeddings.create({ model: 'default', input: 'hi' }), 404, '/v1/embeddings'],
      [() => c.chat.completions.list(), 405, '/v1/chat/completions'], [() => c.chat.completions.create({ model: 'default', ...norway, tools: [tool] }), 400, 'tools']]) {
      counter.attempts = 0;
      await assert.rejects(call(), (e) => e.status === status && e.message.includes(part));
      assert.equal(counter.attempts, 1, part);
    }
  });

  test('an error has type, code and param', async () => {
    await assert.rejects(create({ temperature: 'hot' }), (e) => {
      assert.ok(e instanceof OpenAI.BadRequestError);
      assert.equal(e.code, 'invalid_type');
      assert.equal(e.param, 'temperature');
      assert.equal(e.type, 'invalid_request_error');
      return true;
    });
  });
});

describe('W67 rows of openai', () => {
  test('row 1: usage comes in one chunk of its own', async () => {
    const chunks = [];
    for await (const e of await create({ stream: true, stream_options: { include_usage: true } })) chunks.push(e);
    const withUsage = chunks.filter((c) => c.usage);
    assert.equal(withUsage.length, 1);
    assert.deepEqual(withUsage[0].choices, []);
    assert.equal(chunks.at(-1), withUsage[0]);
    assert.ok(chunks.slice(0, -1).every((c) => c.usage === null && c.choices.length === 1));
  });

  test('row 3: stop strings inside a word, across tokens and as a prefix of the end', async () => {
    const full = 'The capital of Norway is Oslo.';
    for (const [stop, expected] of [['orwa', 'The capital of N'], ['way is Os', 'The capital of Nor'], ['Oslo.!', full], [['slo', 'Oslo'], 'The capital of Norway is ']]) {
      const r = await create({ stop });
      assert.equal(r.choices[0].message.content, expected, JSON.stringify(stop));
      assert.equal(await text(await create({ stop, stream: true })), expected, `stream ${JSON.stringify(stop)}`);
    }
  });

  test('row 4: an emoji arrives whole', async () => {
    const body = { ...ask('Show me a rocket as an emoji.'), model: 'default' };
    const pieces = [];
    for await (const e of await client.chat.completions.create({ ...body, stream: true })) pieces.push(e.choices[0]?.delta?.content ?? '');
    assert.equal(pieces.join(''), 'Here it is: \u{1F680}');
    assert.ok(pieces.every((p) => !p.includes('�') && !/[\ud800-\udbff]$/.test(p)));
  });

  test('row 5: abort in decode, prefill and queue ends the work', async () => {
    const long = { model: 'default', ...ask('Tell me a story.'), ignore_eos: true, max_tokens: 1500 };
    // decode
    const s = await client.chat.completions.create({ ...long, stream: true });
    for await (const e of s) { if (e.choices[0]?.delta?.content) break; }
    await server.idle(1000);
    // prefill and queue: the worker stands still, so the request is in one of the two
    server.worker.kill('SIGSTOP');
    const controllers = [0, 1, 2].map(() => new AbortController());
    const calls = controllers.map((c) => client.chat.completions.create(long, { signal: c.signal }).catch((e) => e));
    await sleep(200);
    controllers.forEach((c) => c.abort());
    for (const call of calls) assert.ok((await call) instanceof OpenAI.APIUserAbortError);
    server.worker.kill('SIGCONT');
    await server.idle(1000);
  });

  test('row 6: max_completion_tokens is honoured', async () => {
    const r = await create({ max_completion_tokens: 3 });
    assert.equal(r.usage.completion_tokens, 3);
    assert.equal(r.choices[0].finish_reason, 'length');
  });

  test('row 11: null content with tool_calls in the history', async () => {
    const messages = [
      { role: 'user', content: 'Hello!' },
      { role: 'assistant', content: null, tool_calls: [{ id: 'c1', type: 'function', function: { name: 'f', arguments: '{}' } }] },
      { role: 'tool', tool_call_id: 'c1', content: '1' },
      { role: 'user', content: 'Hello!' },
    ];
    // This template cannot render tool messages: that is said, and not as a complaint about null.
    await assert.rejects(create({ messages }), (e) => e.status === 400 && e.code === 'unsupported_content');
    const plain = await create({ messages: [messages[0], { role: 'assistant', content: null }, messages[3]] });
    const empty = await create({ messages: [messages[0], { role: 'assistant', content: '' }, messages[3]] });
    assert.equal(plain.choices[0].message.content, empty.choices[0].message.content);
  });

  test('row 12: developer is system', async () => {
    const prompt = async (role) => (await (await server.post('/apply-template', { messages: [{ role, content: 'Answer briefly.' }, { role: 'user', content: 'Hello!' }] })).json()).prompt;
    assert.equal(await prompt('developer'), await prompt('system'));
    const r = await create({ messages: [{ role: 'developer', content: 'Answer briefly.' }, ...norway.messages] });
    assert.ok(r.choices[0].message.content.length > 0);
  });

  test('row 13: overflow is told in a way that clients know, once', async () => {
    const [c, counter] = counted();
    const content = 'word '.repeat(4000);
    await assert.rejects(c.chat.completions.create({ model: 'default', messages: [{ role: 'user', content }] }), (e) => {
      assert.ok(e instanceof OpenAI.BadRequestError);
      assert.equal(e.code, 'context_length_exceeded');
      assert.match(e.message, /maximum context length is 2048 tokens/);
      assert.match(e.message, new RegExp(`${e.error.n_prompt_tokens} tokens`));
      assert.equal(e.error.n_ctx, 2048);
      return true;
    });
    assert.equal(counter.attempts, 1);
  });

  test('row 14: the preflight of a browser that uses openai', async () => {
    const names = 'authorization,content-type,x-stainless-arch,x-stainless-lang,x-stainless-os,x-stainless-package-version,x-stainless-retry-count,x-stainless-runtime,x-stainless-runtime-version,x-stainless-timeout';
    const { raw, httpBytes } = await import('./server.mjs');
    const r = await raw(server, httpBytes('OPTIONS', '/v1/chat/completions', undefined, {
      Origin: 'http://localhost:5173', 'Access-Control-Request-Method': 'POST', 'Access-Control-Request-Headers': names }));
    assert.equal(r.status, 204);
    assert.equal(r.headers['access-control-allow-origin'], 'http://localhost:5173');
    const allowed = r.headers['access-control-allow-headers'].toLowerCase().split(',').map((s) => s.trim());
    for (const n of names.split(',')) assert.ok(allowed.includes(n), n);
  });

  test('row 15: a foreign or empty Host is refused', async () => {
    const { raw, httpBytes } = await import('./server.mjs');
    for (const Host of ['evil.example', ':8080']) {
      const r = await raw(server, httpBytes('GET', '/v1/models', undefined, { Host }));
      assert.equal(r.status, 403, Host);
    }
  });

  test('row 16: localhost and [::1]', async () => {
    for (const host of server.hasV6 ? ['localhost', '[::1]', '127.0.0.1'] : ['localhost', '127.0.0.1']) {
      const c = new OpenAI({ baseURL: `http://${host}:${server.port}/v1`, apiKey: 'x', maxRetries: 0 });
      assert.equal((await c.models.list()).data.length, 1, host);
    }
  });

  test('row 19: half an emoji in the prompt', async () => {
    const r = await create({ messages: [{ role: 'user', content: 'a\ud83d b' }], max_tokens: 4 });
    assert.equal(r.choices.length, 1);
  });

  test('row 20: empty tools and stop', async () => {
    for (const extra of [{ tools: [] }, { stop: [] }, { stop: null }, { tools: [], tool_choice: 'auto', functions: [] }]) {
      const r = await create(extra);
      assert.equal(r.choices[0].message.content, 'The capital of Norway is Oslo.');
    }
  });

  test('row 24: seeds', async () => {
    const at = (seed) => create({ messages: ask('Tell me a story.').messages, temperature: 1, seed, max_tokens: 24 });
    const big = Number.MAX_SAFE_INTEGER;
    const [a, b] = [await at(big), await at(big)];
    assert.equal(a.choices[0].message.content, b.choices[0].message.content);
    assert.equal(a.usage.islet.seed, big);
    await assert.rejects(at(-5), (e) => e.code === 'invalid_value' && e.param === 'seed');
    await assert.rejects(at(2 ** 63), (e) => e.status === 400);
  });
});

test('row 2: a worker that stays away ends the stream with an error', async () => {
  const s = await startServer({ restart: false, set: { 'worker.resume_deadline': '1 s' }, allow: [/./] });
  try {
    const c = new OpenAI({ baseURL: s.v1, apiKey: 'x', maxRetries: 0 });
    const streaming = await c.chat.completions.create({ model: 'default', ...ask('Tell me a story.'), ignore_eos: true, max_tokens: 1900, stream: true });
    await assert.rejects(async () => {
      for await (const e of streaming) { if (e.choices[0]?.delta?.content && s.worker.alive) s.worker.kill(); }
    }, (e) => e.code === 'worker_unavailable');
  } finally {
    await s.stop();
  }
});

test('row 25: a request during the load waits instead of failing', async () => {
  const s = await startServer({ startWorker: false, ready: false });
  try {
    const c = new OpenAI({ baseURL: s.v1, apiKey: 'x', maxRetries: 0 });
    const call = c.chat.completions.create({ model: 'default', ...norway });
    const streamed = c.chat.completions.create({ model: 'default', ...norway, stream: true }).then(text);
    await sleep(700);
    s.worker.start();
    assert.equal((await call).choices[0].message.content, 'The capital of Norway is Oslo.');
    assert.equal(await streamed, 'The capital of Norway is Oslo.');
  } finally {
    await s.stop();
  }
});

test('row 22: thoughts come as reasoning_content', async () => {
  const s = await startServer({ model: thinkModel() });
  try {
    const c = new OpenAI({ baseURL: s.v1, apiKey: 'x', maxRetries: 0 });
    let reasoning = '', content = '';
    for await (const e of await c.chat.completions.create({ model: 'default', ...ask('Hi'), stream: true })) {
      reasoning += e.choices[0]?.delta?.reasoning_content ?? '';
      content += e.choices[0]?.delta?.content ?? '';
    }
    assert.equal(reasoning, 'The user wants a number; I know one.');
    assert.equal(content, '\nIt is forty-two \u{1F600}!');
  } finally {
    await s.stop();
  }
});
