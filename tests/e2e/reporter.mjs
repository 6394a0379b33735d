// Reporter for node --test: a line for each file, the whole story of each failure, and counts in $COUNTS.
import { writeFileSync } from 'node:fs';
import path from 'node:path';

export default async function* reporter(source) {
  const files = new Map();
  const said = new Map(); // standard error of each file
  let passed = 0, failed = 0;
  for await (const { type, data } of source) {
    if (type === 'test:stderr') {
      const name = path.basename(data.file ?? '?');
      said.set(name, ((said.get(name) ?? '') + data.message).slice(-4000));
    }
    if (type !== 'test:pass' && type !== 'test:fail') continue;
    const file = data.file ? path.basename(data.file) : '?';
    const isFile = data.nesting === 0 && data.name.endsWith('.mjs');
    const isSuite = data.details?.type === 'suite';
    const f = files.get(file) ?? { passed: 0, failed: 0 };
    files.set(file, f);
    if (data.skip !== undefined || data.todo !== undefined) continue;
    if (type === 'test:pass') {
      if (isFile || isSuite) continue;
      f.passed++;
      passed++;
    } else {
      const cause = data.details?.error?.cause ?? data.details?.error;
      // A suite or file fails because one of its tests did; that one is reported itself.
      if ((isFile || isSuite) && /subtests? failed|test failed/i.test(String(data.details?.error?.message)) && f.failed > 0) continue;
      f.failed++;
      failed++;
      const heard = isFile ? said.get(path.basename(data.name)) ?? '' : '';
      yield `  FAIL  ${file}: ${data.name}\n${String(cause?.stack ?? cause ?? '').concat('\n', heard).split('\n').slice(0, 60).map((l) => `        ${l}`).join('\n')}\n`;
    }
  }
  for (const [file, f] of [...files].sort()) yield `  ${f.failed ? 'FAIL' : 'ok  '}  ${file}: ${f.passed} passed${f.failed ? `, ${f.failed} failed` : ''}\n`;
  if (process.env.COUNTS) writeFileSync(process.env.COUNTS, `${passed} ${failed}\n`);
}
