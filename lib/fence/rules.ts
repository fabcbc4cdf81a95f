/**
 * The rules of the protocol one by one. Everything runs with PROTOCOL; a test takes single rules out to show that
 * the simulation would notice (test/sim/fence.test.ts).
 */
export interface FenceRules {
  /** a renewal or promise counts from when its beat was sent, not from when the answer came */
  countFromSent: boolean;
  /** without the leader every promotable replica must have promised, not just one */
  everyReplica: boolean;
  /** an older version of the promotable set is never taken again */
  versionedSet: boolean;
  /** a node that was just made active holds nothing: what counted in an older epoch does not count in the new one */
  ownEpochOnly: boolean;
  /** a replica's promise binds for the hold, not just for most of the lease */
  fullPromise: boolean;
  /** a replica promises nothing to an epoch that is over */
  refuseOlderEpoch: boolean;
  /** a replica consents only when its promise has ended */
  promiseBinds: boolean;
  /** a replica that starts anew is bound as if it had promised just now */
  boundAfterStart: boolean;
  /** the leader promotes only when every lease that it granted has surely ended */
  waitForGrants: boolean;
  /** a new leader first waits as if it had granted everything just now */
  waitAfterTakeover: boolean;
  /** the leader grants and decides only while its own lease is surely valid */
  onlyWhileLeading: boolean;
  /** a new leader goes by nothing that it read before it led */
  readAfterTakeover: boolean;
  /** a node that another leader's late write made active is activated only when the own grants have ended */
  waitBeforeActivating: boolean;
  /** a node is made promotable only when the active node has acknowledged the set with it */
  addInTwoSteps: boolean;
  /** an acknowledgement counts for exactly its own version */
  exactAcknowledgement: boolean;
  /** an acknowledged addition is waited for like a grant: csi-node may still go by an answer from before it */
  waitAfterAddition: boolean;
  /** a lease is given back only when csi-node says that no writer is there */
  releaseWhenStopped: boolean;
}

export const PROTOCOL: Readonly<FenceRules> = {
  countFromSent: true,
  everyReplica: true,
  versionedSet: true,
  ownEpochOnly: true,
  fullPromise: true,
  refuseOlderEpoch: true,
  promiseBinds: true,
  boundAfterStart: true,
  waitForGrants: true,
  waitAfterTakeover: true,
  onlyWhileLeading: true,
  readAfterTakeover: true,
  waitBeforeActivating: true,
  addInTwoSteps: true,
  exactAcknowledgement: true,
  waitAfterAddition: true,
  releaseWhenStopped: true,
};
