/** What the demonstration shows while it runs: one table that is redrawn on a terminal, plain lines elsewhere. */
import { parseGeneration } from '../core/generation.ts';
import type { VolumeName } from '../core/parts.ts';
import type { LocalCluster, VolumeStatus } from '../local/cluster.ts';

const PLAIN_EVERY_MS = 2000;
const REDRAW_EVERY_MS = 200;

export interface Style {
  bold(text: string): string;
  dim(text: string): string;
  green(text: string): string;
  red(text: string): string;
  yellow(text: string): string;
}

/** Colours on a terminal only, and never with NO_COLOR (https://no-color.org). */
export function styleFor(stream: NodeJS.WriteStream): Style {
  const on = stream.isTTY === true && (process.env.NO_COLOR ?? '') === '' && process.env.TERM !== 'dumb';
  const paint =
    (code: number) =>
    (text: string): string =>
      on ? `\u001b[${code}m${text}\u001b[0m` : text;
  return { bold: paint(1), dim: paint(2), green: paint(32), red: paint(31), yellow: paint(33) };
}

interface Row {
  node: string;
  role: string;
  generation: string;
  lag: string;
  fresh: string;
  state: string;
}

const COLUMNS = ['node', 'role', 'generation', 'lag', 'fresh', 'state'] as const;
const WIDTHS = { node: 6, role: 9, generation: 12, lag: 16, fresh: 14, state: 24 } as const;

const ms = (value: number): string =>
  value < 1000 ? `${Math.round(value)} ms` : `${(value / 1000).toFixed(1)} s`;

/** One row a node from what the agents say of themselves. */
export function rowsOf(statuses: ReadonlyMap<string, VolumeStatus | null | 'away'>): Row[] {
  let newest: number | null = null;
  for (const status of statuses.values()) {
    if (status !== null && status !== 'away' && status.role === 'active' && status.generation !== null) {
      newest = Math.max(newest ?? 0, parseGeneration(status.generation).seq);
    }
  }
  return [...statuses].map(([node, status]): Row => {
    if (status === 'away')
      return { node, role: '-', generation: '-', lag: '-', fresh: '-', state: 'does not answer' };
    if (status === null)
      return { node, role: '-', generation: '-', lag: '-', fresh: '-', state: 'no volume yet' };
    const generation = status.generation ?? '-';
    if (status.role === 'active') {
      const waiting = status.pending > 0 ? `${status.pending} changes wait` : '';
      return {
        node,
        role: 'active',
        generation,
        lag: waiting,
        fresh: 'it is the source',
        state: status.state,
      };
    }
    const behind =
      newest === null || status.generation === null ? null : newest - parseGeneration(status.generation).seq;
    return {
      node,
      role: 'replica',
      generation,
      lag: behind === null ? '-' : behind <= 0 ? 'none' : `${behind} behind`,
      fresh: status.freshAgeMs === null ? 'never' : `${ms(status.freshAgeMs)} ago`,
      state: status.state,
    };
  });
}

export class View {
  readonly style: Style;
  readonly #cluster: LocalCluster;
  readonly #volume: VolumeName;
  readonly #out: NodeJS.WriteStream;
  readonly #started = performance.now();
  #timer: NodeJS.Timeout | null = null;
  #drawn = 0;
  #rows: Row[] = [];
  #asking = false;
  #note = '';

  constructor(cluster: LocalCluster, volume: VolumeName, out: NodeJS.WriteStream = process.stdout) {
    this.#cluster = cluster;
    this.#volume = volume;
    this.#out = out;
    this.style = styleFor(out);
  }

  /** Text beside the clock, e.g. what the writer has done. */
  note(text: string): void {
    this.#note = text;
  }

  start(): void {
    const every = this.#out.isTTY ? REDRAW_EVERY_MS : PLAIN_EVERY_MS;
    this.#timer = setInterval(() => void this.#tick(), every);
    void this.#tick();
  }

  stop(): void {
    if (this.#timer !== null) clearInterval(this.#timer);
    this.#timer = null;
    this.#erase();
    this.#drawn = 0;
  }

  /** A line that stays, above the table. */
  line(text = ''): void {
    this.#erase();
    this.#out.write(`${text}\n`);
    this.#draw();
  }

  async #tick(): Promise<void> {
    if (this.#asking) return;
    this.#asking = true;
    const statuses = new Map<string, VolumeStatus | null | 'away'>();
    await Promise.all(
      [...this.#cluster.agents.values()].map(async (agent) => {
        statuses.set(
          agent.node,
          agent.running ? await agent.status(this.#volume, 1000).catch(() => 'away' as const) : 'away',
        );
      }),
    );
    this.#asking = false;
    if (this.#timer === null) return;
    const ordered = new Map([...statuses].sort(([a], [b]) => (a < b ? -1 : 1)));
    this.#rows = rowsOf(ordered);
    if (this.#out.isTTY) {
      this.#erase();
      this.#draw();
    } else {
      const seconds = ((performance.now() - this.#started) / 1000).toFixed(1).padStart(5);
      const cells = this.#rows.map(
        (row) => `${row.node} ${row.role} ${row.generation} ${row.state}, fresh ${row.fresh}`,
      );
      this.#out.write(
        `${seconds} s  ${cells.join('  |  ')}${this.#note === '' ? '' : `  |  ${this.#note}`}\n`,
      );
    }
  }

  #erase(): void {
    if (!this.#out.isTTY || this.#drawn === 0) return;
    this.#out.write(`\u001b[${this.#drawn}A\u001b[0J`);
    this.#drawn = 0;
  }

  #draw(): void {
    if (!this.#out.isTTY || this.#timer === null || this.#rows.length === 0) return;
    const cell = (row: Row | null, column: (typeof COLUMNS)[number]): string =>
      (row === null ? column : row[column]).padEnd(WIDTHS[column]);
    const lines = [
      '',
      this.style.dim(`  ${COLUMNS.map((column) => cell(null, column)).join(' ')}`),
      ...this.#rows.map((row) => {
        const text = `  ${COLUMNS.map((column) => cell(row, column)).join(' ')}`;
        if (row.role === 'active') return this.style.bold(text);
        if (row.role === '-') return this.style.red(text);
        return row.state === 'idle' ? this.style.green(text) : this.style.yellow(text);
      }),
      this.style.dim(`  ${((performance.now() - this.#started) / 1000).toFixed(1)} s  ${this.#note}`),
    ];
    // A line that wraps would break the counting of lines.
    const width = Math.max(20, this.#out.columns ?? 80);
    const tooWide = lines.some((line) => line.replace(/\u001b\[\d+m/g, '').length > width);
    const fitted = tooWide ? lines.map((line) => line.replace(/\u001b\[\d+m/g, '').slice(0, width)) : lines;
    this.#out.write(`${fitted.join('\n')}\n`);
    this.#drawn = fitted.length;
  }
}
