/** A gate that lets only so many pieces of work in at once; the agent shares one between all its volumes. */
export interface Gate {
  run<T>(work: () => Promise<T>): Promise<T>;
}
