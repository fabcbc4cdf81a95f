import { SimpleVolumeError } from '../../core/errors.ts';

/** Permission bits given as a number or as octal text ("0664"). */
export const parseMode = (value: number | string | null | undefined): number | null =>
  value === undefined || value === null
    ? null
    : typeof value === 'number'
      ? value
      : Number.parseInt(value, 8);

/** A path below the volume's root; what could leave it is refused. A trailing slash is dropped. */
export function parseRelativePath(text: string, field: string): string {
  const path = text.replace(/\/+$/, '');
  if (
    path === '' ||
    path.startsWith('/') ||
    path.includes('\0') ||
    path.split('/').some((part) => part === '' || part === '.' || part === '..')
  )
    throw new SimpleVolumeError(
      'FIELD_INVALID',
      `${field} must be a path below the volume's root, without '.', '..' or empty parts; got ${JSON.stringify(text.slice(0, 200))}`,
      { field },
    );
  return path;
}
