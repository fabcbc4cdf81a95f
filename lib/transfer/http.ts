/** HTTP's small rules for the WebDAV tree: targets as bytes, dates, ranges, conditions. Pure. */
import type { IncomingHttpHeaders } from 'node:http';
import { SimpleVolumeError } from '../core/errors.ts';

const bad = (message: string): SimpleVolumeError =>
  new SimpleVolumeError('FIELD_INVALID', message, { field: 'url' });

const hex = (c: number | undefined): number =>
  c === undefined
    ? -1
    : c >= 0x30 && c <= 0x39
      ? c - 0x30
      : c >= 0x41 && c <= 0x46
        ? c - 0x37
        : c >= 0x61 && c <= 0x66
          ? c - 0x57
          : -1;

/**
 * Path segments of a request target, as bytes: a name need not be UTF-8. Empty segments and '.' are dropped
 * (rclone asks for `./a:b`).
 * @throws FIELD_INVALID for a bad escape, a NUL byte, an escaped slash, '..', or anything that is not a path
 */
export function parseTarget(url: string): Buffer[] {
  if (url === '*') return [];
  if (!url.startsWith('/')) throw bad('the request target must be a path');
  const query = url.indexOf('?');
  // Node hands the target over byte by byte (latin1)
  const raw = Buffer.from(query < 0 ? url : url.slice(0, query), 'latin1');
  const segments: Buffer[] = [];
  for (let at = 0; at < raw.length; ) {
    let end = raw.indexOf(0x2f, at);
    if (end < 0) end = raw.length;
    const segment = Buffer.allocUnsafe(end - at);
    let n = 0;
    while (at < end) {
      let c = raw[at++] as number;
      if (c === 0x25) {
        const high = at + 1 < end ? hex(raw[at]) : -1;
        const low = hex(raw[at + 1]);
        if (high < 0 || low < 0) throw bad('the path has a % that is not followed by two hexadecimal digits');
        c = high * 16 + low;
        at += 2;
        if (c === 0x2f) throw bad('the path has an escaped slash');
      }
      if (c === 0) throw bad('the path has a NUL byte');
      segment[n++] = c;
    }
    at = end + 1;
    const name = segment.subarray(0, n);
    if (n === 2 && name[0] === 0x2e && name[1] === 0x2e) throw bad("the path has a '..'");
    if (n > 0 && !(n === 1 && name[0] === 0x2e)) segments.push(name);
  }
  return segments;
}

const UNRESERVED = /[A-Za-z0-9._~-]/;
const ESCAPES = Array.from({ length: 256 }, (_, c) => {
  const char = String.fromCharCode(c);
  return UNRESERVED.test(char) ? char : `%${c.toString(16).toUpperCase().padStart(2, '0')}`;
});

/** One name, escaped byte by byte. */
export function escapeName(name: Buffer): string {
  let out = '';
  for (const c of name) out += ESCAPES[c];
  return out;
}
/** The href of a resource; a collection ends in a slash. */
export const hrefOf = (segments: Buffer[], collection: boolean): string =>
  segments.length === 0 ? '/' : `/${segments.map(escapeName).join('/')}${collection ? '/' : ''}`;

/** A name for people: itself where it is clean text, else escaped. Never needed to build a URL. */
export function displayName(name: Buffer): string {
  const text = name.toString('utf8');
  const clean =
    Buffer.from(text, 'utf8').equals(name) && !/[\u0000-\u001f\u007f-\u009f\ufffe\uffff]/.test(text);
  return clean ? text : escapeName(name);
}

export const escapeXml = (text: string): string => text.replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);

/** RFC 9110 date. Times outside the years 1970 to 9999 are moved to the nearest end. */
export const httpDate = (ms: number): string =>
  new Date(Math.min(Math.max(Math.floor(ms / 1000) * 1000, 0), 253_402_300_799_000)).toUTCString();

export interface ByteRange {
  start: number;
  /** exclusive */
  end: number;
}

/**
 * The one range that is sent. Ranges that touch are joined; several that do not are answered with the whole
 * (RFC 9110 section 14.2 allows that), so there is never a multipart body.
 * @returns null: send everything; 'unsatisfiable': 416
 */
export function parseRange(header: string | undefined, size: number): ByteRange | null | 'unsatisfiable' {
  const m = /^bytes=([\d\s,-]{1,1000})$/i.exec(header ?? '');
  if (!m) return null;
  const ranges: ByteRange[] = [];
  let specs = 0;
  for (const part of (m[1] as string).split(',')) {
    const spec = part.trim();
    if (spec === '') continue;
    const r = /^(\d{0,15})-(\d{0,15})$/.exec(spec);
    if (!r || (r[1] === '' && r[2] === '')) return null;
    specs++;
    if (r[1] === '') {
      const last = Number(r[2]);
      if (last > 0 && size > 0) ranges.push({ start: Math.max(0, size - last), end: size });
      continue;
    }
    const start = Number(r[1]);
    const end = r[2] === '' ? size : Number(r[2]) + 1;
    if (end <= start && r[2] !== '') return null;
    if (start < size) ranges.push({ start, end: Math.min(end, size) });
  }
  if (specs === 0) return null;
  if (ranges.length === 0) return 'unsatisfiable';
  ranges.sort((a, b) => a.start - b.start);
  const one = { ...(ranges[0] as ByteRange) };
  for (const r of ranges) {
    if (r.start > one.end) return null;
    one.end = Math.max(one.end, r.end);
  }
  return one;
}

export interface Validators {
  /** with its quotes; always strong here */
  etag: string | null;
  modifiedMs: number | null;
}

const tags = (header: string): string[] => header.match(/(?:W\/)?"[^"]*"|\*/g) ?? [];
const weak = (tag: string): string => tag.replace(/^W\//, '');
const second = (ms: number): number => Math.floor(ms / 1000);

/** RFC 9110 section 13.2.2, for GET and HEAD: 200 go on, 304, or 412. */
export function checkConditions(h: IncomingHttpHeaders, v: Validators): 200 | 304 | 412 {
  if (h['if-match'] !== undefined) {
    const given = tags(h['if-match']);
    if (!given.includes('*') && !(v.etag && given.includes(v.etag))) return 412;
  } else if (h['if-unmodified-since'] && v.modifiedMs !== null) {
    const since = Date.parse(h['if-unmodified-since']);
    if (!Number.isNaN(since) && second(v.modifiedMs) > second(since)) return 412;
  }
  if (h['if-none-match'] !== undefined) {
    const given = tags(h['if-none-match']);
    if (given.includes('*') || (v.etag && given.some((g) => weak(g) === v.etag))) return 304;
  } else if (h['if-modified-since'] && v.modifiedMs !== null) {
    const since = Date.parse(h['if-modified-since']);
    if (!Number.isNaN(since) && second(v.modifiedMs) <= second(since)) return 304;
  }
  return 200;
}

/** If-Range: whether the Range header counts. */
export function rangeApplies(h: IncomingHttpHeaders, v: Validators): boolean {
  const given = h['if-range'];
  if (typeof given !== 'string') return true;
  if (given.startsWith('"')) return given === v.etag;
  if (given.startsWith('W/') || v.modifiedMs === null) return false;
  return second(Date.parse(given)) === second(v.modifiedMs);
}
