/** The Identity service, the same in both processes but for what Probe looks at. */

import { DRIVER } from './driver.ts';
import { unavailable } from './errors.ts';
import type { Service } from './grpc.ts';

/**
 * @param ready null: ready; else why not (for now)
 */
export function identityService(
  version: string,
  ready: () => Promise<string | null> | string | null,
): Service {
  return {
    name: 'csi.v1.Identity',
    methods: {
      GetPluginInfo: () => ({ name: DRIVER, vendor_version: version }),
      GetPluginCapabilities: () => ({
        capabilities: [
          { service: { type: 'CONTROLLER_SERVICE' } },
          { service: { type: 'VOLUME_ACCESSIBILITY_CONSTRAINTS' } },
          { volume_expansion: { type: 'ONLINE' } },
        ],
      }),
      Probe: async () => {
        const problem = await ready();
        return problem === null ? { ready: { value: true } } : unavailable(problem);
      },
    },
  };
}
