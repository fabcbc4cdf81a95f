/** What one figure gives to the table. */
export interface Measure {
  name: string;
  value: number;
  unit: 's' | 'MiB' | '%' | 'files/s' | 'MB/s' | '1/s';
  /** Highest value that was aimed at; absent: for comparison only. */
  target?: number;
  note?: string;
}

export interface Figure {
  title: string;
  /** How it was measured, in one sentence. */
  method: string;
  run(say: (text: string) => void): Promise<Measure[]>;
}

export const MIB = 1024 * 1024;
export const GIB = 1024 * MIB;
