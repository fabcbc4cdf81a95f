{{- define "sv.name" -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "sv.image" -}}
{{- $tag := .Values.image.tag | default .Chart.AppVersion -}}
{{- .Values.image.repository -}}{{ if .Values.image.digest }}@{{ .Values.image.digest }}{{ else }}:{{ $tag }}{{ end -}}
{{- end -}}

{{/* Labels of a part: dict "root" $ "part" NAME */}}
{{- define "sv.labels" -}}
{{ include "sv.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{- define "sv.selector" -}}
app.kubernetes.io/name: simple-volume
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .part }}
{{- end -}}

{{- define "sv.secret" -}}
{{- .Values.security.existingSecret | default (printf "%s-agents" (include "sv.name" .)) -}}
{{- end -}}

{{- define "sv.triggerSecret" -}}
{{- .Values.manualSync.existingSecret | default (printf "%s-trigger" (include "sv.name" .)) -}}
{{- end -}}

{{- define "sv.pullSecrets" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
{{- end -}}

{{/* A container that may do nothing: dict of what differs is appended by the caller. */}}
{{- define "sv.confined" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
{{- end -}}

{{/* Directory on the host in which agents and the node plugin meet. */}}
{{- define "sv.runDir" -}}
{{ .Values.kubeletDir }}/plugins/simple-volume.csi.shipstuff.io/agents
{{- end -}}

{{/* Whole MiB of a quantity as Kubernetes writes them, 0 for none: 512Mi, 1.5Gi, 500M, 1e9, 1073741824. */}}
{{- define "sv.mebibytes" -}}
{{- $text := toString . -}}
{{- if kindIs "float64" . }}{{ $text = printf "%.0f" . }}{{ end -}}
{{- $unit := regexFind "[A-Za-z]i?$" $text -}}
{{- $bytes := get (dict "" 1 "k" 1000 "M" 1000000 "G" 1000000000 "T" 1000000000000 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776) $unit -}}
{{- if and $text (not $bytes) }}{{ fail (printf "%s is no amount of memory" $text) }}{{ end -}}
{{- floor (divf (mulf (float64 (trimSuffix $unit $text)) (float64 $bytes)) 1048576.0) -}}
{{- end -}}

{{/* Values that are fine alone and not together. */}}
{{- define "sv.check" -}}
{{- $ports := .Values.agent.ports -}}
{{- if eq (int $ports.http) (int $ports.webdav) }}
{{- fail (printf "agent.ports: http and webdav are both %d" (int $ports.http)) }}
{{- end }}
{{- if and .Values.manualSync.enabled (has (int .Values.manualSync.port) (list 8082 8090 8444)) }}
{{- fail (printf "manualSync.port: %d is taken in the controller's pod" (int .Values.manualSync.port)) }}
{{- end }}
{{- $limit := include "sv.mebibytes" (dig "limits" "memory" "" (.Values.agent.resources | default dict)) | int -}}
{{- $pull := .Values.agent.pull -}}
{{- $buffer := include "sv.mebibytes" $pull.buffer | int -}}
{{- if gt $buffer 64 }}{{ fail (printf "agent.pull.buffer: %s is more than 64Mi" $pull.buffer) }}{{ end }}
{{- $needed := add 160 (mul $pull.concurrency (add 25 $buffer)) | int -}}
{{- if and (gt $limit 0) (gt $needed $limit) }}
{{- fail (printf "agent.pull: %d pulls with a buffer of %s need %d MiB, agent.resources.limits.memory is %d MiB" ($pull.concurrency | int) $pull.buffer $needed $limit) }}
{{- end }}
{{- $paths := dict -}}
{{- range $pool := .Values.storagePools }}
{{- if hasKey $paths $pool.name }}{{ fail (printf "storagePools: the name %s is used twice" $pool.name) }}{{ end }}
{{- range $other, $path := $paths }}
{{- if or (eq $path $pool.path) (hasPrefix (printf "%s/" $path) $pool.path) (hasPrefix (printf "%s/" $pool.path) $path) }}
{{- fail (printf "storagePools: the paths of %s and %s overlap" $other $pool.name) }}
{{- end }}
{{- end }}
{{- $_ := set $paths $pool.name $pool.path }}
{{- $kubelet := $.Values.kubeletDir }}
{{- if or (eq $kubelet $pool.path) (hasPrefix (printf "%s/" $kubelet) $pool.path) (hasPrefix (printf "%s/" $pool.path) $kubelet) }}
{{- fail (printf "storagePools: the path of %s and kubeletDir %s overlap" $pool.name $kubelet) }}
{{- end }}
{{- end }}
{{- end -}}
