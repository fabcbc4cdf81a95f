export type * from '../core/store.ts';
