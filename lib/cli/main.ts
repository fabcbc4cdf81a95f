/** Entry of the command; lib/cli/bin.js starts it with the right Node and the right flags. */
import { runMain } from './run-main.ts';
import { VERBS } from './verbs.ts';

await runMain(VERBS);
