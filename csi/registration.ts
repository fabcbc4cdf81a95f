/** kubelet's plugin registration: kubelet watches a folder for sockets and asks each who it is. */
import type { Logger } from '../lib/core/parts.ts';
import { DRIVER } from './driver.ts';
import type { Service } from './grpc.ts';

/**
 * @param endpoint the CSI socket as kubelet sees it
 * @param onStatus what kubelet made of it
 */
export function registrationService(
  endpoint: string,
  log: Logger,
  onStatus: (registered: boolean, error: string) => void = () => undefined,
): Service {
  return {
    name: 'pluginregistration.Registration',
    methods: {
      GetInfo: () => ({ type: 'CSIPlugin', name: DRIVER, endpoint, supported_versions: ['1.0.0'] }),
      NotifyRegistrationStatus: (request: { plugin_registered: boolean; error: string }) => {
        if (request.plugin_registered) log.info({ endpoint }, 'kubelet has registered the driver');
        else log.error({ endpoint, error: request.error }, 'kubelet did not register the driver');
        onStatus(request.plugin_registered, request.error);
        return {};
      },
    },
  };
}
