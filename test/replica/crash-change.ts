import fs from 'node:fs';
import path from 'node:path';
import type { TestSource } from './support.ts';

/** A state with everything in it that an operation exists for. */
export function fill(root: string): void {
  const put = (name: string, data: string | Buffer): void => {
    fs.mkdirSync(path.dirname(path.join(root, name)), { recursive: true });
    fs.writeFileSync(path.join(root, name), data);
  };
  for (let i = 0; i < 5; i++) {
    put(`gone/deep${i}/f`, `${i}`);
    put(`keep/f${i}`, `keep ${i}`);
    put(`moves/m${i}`, `move ${i}`);
  }
  put('swap-a', 'AAAA');
  put('swap-b', 'BBBB');
  put('big', Buffer.alloc(2_000_000, 1));
  put('big-too', Buffer.alloc(1_500_000, 2));
  put('type', 'file');
  put('dir/inside', 'x');
  put('h1', 'hard');
  fs.linkSync(path.join(root, 'h1'), path.join(root, 'h2'));
  fs.symlinkSync('h1', path.join(root, 'link'));
}

/** Every kind of change; several of most, so that a crash finds some done and some not. */
export function change(source: TestSource): void {
  const at = (name: string): string => path.join(source.root, name);
  fs.rmSync(at('gone'), { recursive: true });
  fs.mkdirSync(at('moved/deeper'), { recursive: true });
  for (let i = 0; i < 5; i++) {
    fs.renameSync(at(`moves/m${i}`), at(`moved/deeper/m${i}`));
    source.moves.set(`moved/deeper/m${i}`, `moves/m${i}`);
    fs.writeFileSync(at(`keep/f${i}`), `kept ${i}, but changed`);
  }
  fs.renameSync(at('swap-a'), at('swap'));
  fs.renameSync(at('swap-b'), at('swap-a'));
  fs.renameSync(at('swap'), at('swap-b'));
  source.moves.set('swap-a', 'swap-b');
  source.moves.set('swap-b', 'swap-a');
  for (const name of ['big', 'big-too']) {
    const fd = fs.openSync(at(name), 'r+');
    for (const offset of [10, 300_000, 1_200_000]) fs.writeSync(fd, `new at ${offset}`, offset);
    fs.closeSync(fd);
  }
  fs.truncateSync(at('big-too'), 1_300_000);
  fs.rmSync(at('type'));
  fs.mkdirSync(at('type'));
  fs.writeFileSync(at('type/now'), 'a folder');
  fs.rmSync(at('dir'), { recursive: true });
  fs.writeFileSync(at('dir'), 'a file');
  fs.linkSync(at('h1'), at('keep/h3'));
  fs.rmSync(at('h2'));
  fs.rmSync(at('link'));
  fs.symlinkSync('swap-a', at('link'));
  fs.chmodSync(at('keep/f0'), 0o751);
  fs.utimesSync(at('keep'), 1, 1_500_000_000.25);
  fs.chmodSync(source.root, 0o750);
}
