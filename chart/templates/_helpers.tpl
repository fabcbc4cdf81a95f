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

{{/* MiB of a quantity with Ki, Mi or Gi, or of bytes; 0 for none. */}}
{{- define "sv.mebibytes" -}}
{{- $text := toString . -}}
{{- if hasSuffix "Gi" $text }}{{ mul 1024 (trimSuffix "Gi" $text | int) }}
{{- else if hasSuffix "Mi" $text }}{{ trimSuffix "Mi" $text | int }}
{{- else if hasSuffix "Ki" $text }}{{ div (trimSuffix "Ki" $text | int) 1024 }}
{{- else }}{{ div (int64 $text) 1048576 }}
{{- end -}}
{{- end -}}
