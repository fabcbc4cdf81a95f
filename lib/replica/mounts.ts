import { readFileSync, realpathSync } from 'node:fs';

interface Mount {
  device: string;
  /** path within the file system that is mounted */
  root: string;
  point: string;
}

const unescaped = (text: string): string =>
  text.replace(/\\([0-7]{3})/g, (_, octal: string) => String.fromCharCode(Number.parseInt(octal, 8)));

/** The lines of /proc/<pid>/mountinfo (proc_pid_mountinfo(5)), latin1 so that any name survives. */
export function parseMountinfo(text: string): Mount[] {
  const out: Mount[] = [];
  for (const line of text.split('\n')) {
    const [, , device, root, point] = line.split(' ');
    if (device && root && point) out.push({ device, root: unescaped(root), point: unescaped(point) });
  }
  return out;
}

const isBelow = (path: string, directory: string): boolean =>
  directory === '/' || path === directory || path.startsWith(`${directory}/`);

/**
 * Where a directory, or something below it, is mounted once more: bind mounts of it, which is how a pod gets a
 * volume. The mount through which the directory itself is reached does not count.
 * @param directory absolute, without symbolic links; latin1
 */
export function bindMountsOf(mountinfo: string, directory: string): string[] {
  const mounts = parseMountinfo(mountinfo);
  let own: Mount | null = null;
  // the last of the longest mount points is the one on top
  for (const m of mounts)
    if (isBelow(directory, m.point) && (!own || m.point.length >= own.point.length)) own = m;
  if (!own) return [];
  const inside = own.point === '/' ? directory : directory.slice(own.point.length);
  const rootOf = own.root === '/' ? inside || '/' : own.root + inside;
  const found: string[] = [];
  for (const m of mounts)
    if (m.device === own.device && m !== own && isBelow(m.root, rootOf)) found.push(m.point);
  // a directory that is a mount of its own (bound onto itself by someone) is not the plain tree either
  if (own.point === directory) found.push(own.point);
  return found;
}

/** Mount points at which the tree at `directory` is in use, as this process sees mounts. */
export function mountsOf(directory: string): string[] {
  let real: string;
  try {
    real = realpathSync(directory);
  } catch (error) {
    if ((error as NodeJS.ErrnoException).code === 'ENOENT') return [];
    throw error;
  }
  // made by the kernel on reading: no disk is waited for
  const text = readFileSync('/proc/self/mountinfo', 'latin1');
  return bindMountsOf(text, Buffer.from(real, 'utf8').toString('latin1'));
}
