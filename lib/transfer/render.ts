/** The two faces of a folder: PROPFIND's XML for clients, a page without scripts for browsers. Pure text. */
import { formatGeneration } from '../core/generation.ts';
import type { ServedGeneration } from '../core/parts.ts';
import { displayName, escapeXml, hrefOf, httpDate } from './http.ts';

export interface Entry {
  name: Buffer;
  kind: 'collection' | 'file' | 'symlink';
  /** bytes; null: not known yet */
  size: number | null;
  modifiedMs: number | null;
  etag: string | null;
  /** of a symlink */
  target?: Buffer;
}

export const MULTISTATUS_OPEN = '<?xml version="1.0" encoding="utf-8"?>\n<D:multistatus xmlns:D="DAV:">\n';
export const MULTISTATUS_CLOSE = '</D:multistatus>\n';
export const FINITE_DEPTH =
  '<?xml version="1.0" encoding="utf-8"?>\n<D:error xmlns:D="DAV:"><D:propfind-finite-depth/></D:error>\n';

/** One `response` of a multistatus. */
export function propfindEntry(at: Buffer[], e: Entry): string {
  const collection = e.kind === 'collection';
  const props = [
    `<D:displayname>${escapeXml(displayName(e.name))}</D:displayname>`,
    `<D:resourcetype>${collection ? '<D:collection/>' : ''}</D:resourcetype>`,
    !collection && e.size !== null ? `<D:getcontentlength>${e.size}</D:getcontentlength>` : '',
    collection ? '' : '<D:getcontenttype>application/octet-stream</D:getcontenttype>',
    e.modifiedMs !== null ? `<D:getlastmodified>${httpDate(e.modifiedMs)}</D:getlastmodified>` : '',
    e.etag ? `<D:getetag>${escapeXml(e.etag)}</D:getetag>` : '',
  ];
  return `<D:response><D:href>${hrefOf(at, collection)}</D:href><D:propstat><D:prop>${props.join('')}</D:prop><D:status>HTTP/1.1 200 OK</D:status></D:propstat></D:response>\n`;
}

const UNITS = ['B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB'];
/** Bytes for people: `1.5 MiB`. */
export function humanSize(bytes: number): string {
  let n = bytes;
  let unit = 0;
  while (n >= 1024 && unit < UNITS.length - 1) {
    n /= 1024;
    unit++;
  }
  return `${unit === 0 ? n : n.toFixed(n < 10 ? 1 : 0)} ${UNITS[unit]}`;
}

const isoTime = (ms: number): string => {
  const d = new Date(ms);
  return Number.isNaN(d.getTime()) ? '' : `${d.toISOString().slice(0, 19).replace('T', ' ')} UTC`;
};

const STYLE = `:root{color-scheme:light dark;--line:#d8dce2;--soft:#5c6675;--hover:#f3f5f8;--link:#0a58ca}
@media (prefers-color-scheme:dark){:root{--line:#343a43;--soft:#9aa4b2;--hover:#22272e;--link:#7fb2ff}}
body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem}
h1{font-size:1.2rem;font-weight:600;margin:0 0 .25rem;overflow-wrap:anywhere}
p{margin:0 0 1.25rem;color:var(--soft)}
a{color:var(--link);text-decoration:none}a:hover{text-decoration:underline}
table{border-collapse:collapse;width:100%}
th{text-align:left;font-weight:600;color:var(--soft)}
th,td{padding:.35rem .6rem;border-bottom:1px solid var(--line);vertical-align:top}
td:first-child{overflow-wrap:anywhere;white-space:pre-wrap}
.n{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}
.t{white-space:nowrap;color:var(--soft)}
tr:hover td{background:var(--hover)}`;

/** Browsers get no script, no form and nothing from elsewhere. */
export const PAGE_CSP =
  "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

export function pageOpen(at: Buffer[], served: ServedGeneration | null, note = ''): string {
  const crumbs = at.map((name, i) => {
    const text = escapeXml(displayName(name));
    return i === at.length - 1 ? text : `<a href="${hrefOf(at.slice(0, i + 1), true)}">${text}</a>`;
  });
  const title = at.length === 0 ? 'simple-volume' : displayName(at.at(-1) as Buffer);
  const state = served
    ? `Generation ${formatGeneration(served.generation)}, ${served.quiescent ? 'an exact point in time' : 'fuzzy: the volume was written to while it was sealed'}`
    : note;
  const up =
    at.length > 0
      ? `<tr><td><a href="${hrefOf(at.slice(0, -1), true)}">..</a></td><td class="n"></td><td class="t"></td></tr>\n`
      : '';
  return `<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>${escapeXml(title)}</title><style>${STYLE}</style></head><body>
<h1><a href="/">simple-volume</a>${crumbs.map((c) => ` / ${c}`).join('')}</h1>
<p>${escapeXml(state)}</p>
<table><thead><tr><th>Name</th><th class="n">Size</th><th>Modified</th></tr></thead><tbody>
${up}`;
}

export function pageRow(at: Buffer[], e: Entry): string {
  const collection = e.kind === 'collection';
  const text = escapeXml(displayName(e.name));
  const name =
    e.kind === 'symlink'
      ? `${text} &rarr; ${escapeXml(displayName(e.target ?? Buffer.alloc(0)))}`
      : `<a href="${hrefOf([...at, e.name], collection)}">${text}${collection ? '/' : ''}</a>`;
  const size =
    e.kind === 'file' && e.size !== null ? `<span title="${e.size} bytes">${humanSize(e.size)}</span>` : '';
  const time = e.modifiedMs === null ? '' : isoTime(e.modifiedMs);
  return `<tr><td>${name}</td><td class="n">${size}</td><td class="t">${time}</td></tr>\n`;
}

export const PAGE_CLOSE = '</tbody></table></body></html>\n';
