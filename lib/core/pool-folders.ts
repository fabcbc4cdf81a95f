/** What a pool has beside the live trees, as folders of these names in its own. */
export const POOL_FOLDERS = {
  shadows: '.simple-volume-shadows',
  incoming: '.simple-volume-incoming',
  /** what returning nodes had: <namespace>/<volume>/<stamp> */
  backups: '.simple-volume-backups',
  state: '.simple-volume-state',
  trash: '.simple-volume-trash',
} as const;
