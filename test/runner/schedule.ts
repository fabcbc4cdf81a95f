/** Runs steps in parallel: each begins when the steps that it needs are done and a slot is free. */
export interface Step<T> {
  name: string;
  /** Names of steps that must have succeeded; when one has not, this one is not begun. */
  needs?: readonly string[];
  /** Takes all slots: nothing else runs at the same time, besides what is in the background. */
  alone?: boolean;
  /** Takes no slot: a long build at low priority, beside which everything else goes on. */
  background?: boolean;
  run(): Promise<T>;
}

export interface Outcome<T> {
  step: Step<T>;
  /** Undefined when a step that it needs had failed. */
  value: T | undefined;
  seconds: number;
}

/**
 * @param steps in the order of preference; a step may need only steps before it
 * @param good whether a step's value lets the steps go on that need it
 * @param report called as each ends (or is given up)
 */
export async function runSteps<T>(
  steps: readonly Step<T>[],
  slots: number,
  good: (value: T) => boolean,
  report: (outcome: Outcome<T>) => void,
  begun: (step: Step<T>) => void = () => {},
): Promise<void> {
  const waiting = [...steps];
  const state = new Map<string, boolean>();
  let busy = 0;
  let running = 0;
  for (const step of steps) {
    for (const need of step.needs ?? []) {
      if (!steps.some((one) => one.name === need))
        throw new Error(`${step.name} needs ${need}, which is no step`);
    }
  }
  await new Promise<void>((resolve, reject) => {
    const settle = (outcome: Outcome<T>): void => {
      state.set(outcome.step.name, outcome.value !== undefined && good(outcome.value));
      report(outcome);
    };
    const next = (): void => {
      for (let i = 0; i < waiting.length; ) {
        const step = waiting[i] as Step<T>;
        const needs = step.needs ?? [];
        if (needs.some((need) => state.get(need) === false)) {
          waiting.splice(i, 1);
          settle({ step, value: undefined, seconds: 0 });
          i = 0;
          continue;
        }
        const weight = step.alone ? slots : step.background ? 0 : 1;
        if (busy + weight > slots || !needs.every((need) => state.get(need) === true)) {
          i++;
          continue;
        }
        waiting.splice(i, 1);
        busy += weight;
        running++;
        const started = performance.now();
        begun(step);
        step
          .run()
          .then((value) => {
            busy -= weight;
            running--;
            settle({ step, value, seconds: (performance.now() - started) / 1000 });
            next();
          })
          .catch(reject);
      }
      if (waiting.length === 0 && running === 0) resolve();
      else if (running === 0)
        reject(new Error(`steps wait for each other: ${waiting.map((s) => s.name).join(', ')}`));
    };
    next();
  });
}
