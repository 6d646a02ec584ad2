{{- define "recserve.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "recserve.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "recserve.labels" -}}
{{ include "recserve.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "recserve.secret" -}}
{{- .Values.secret.existing | default (include "recserve.name" .) }}
{{- end }}

{{- /* Most pods that serve at the same time. */}}
{{- define "recserve.mostReplicas" -}}
{{- if .Values.autoscaling.enabled }}{{ .Values.autoscaling.maxReplicas }}
{{- else }}{{ include "recserve.replicas" . }}{{ end }}
{{- end }}

{{- /* Where pods keep changes of items: the value, or the Redis of the store if there is one. */}}
{{- define "recserve.catalogLog" -}}
{{- $store := .Values.secret.store | default .Values.config.store | toString }}
{{- $redis := regexMatch "^(rediss?(\\+sentinel|\\+cluster)?|unix)://" $store }}
{{- .Values.config.catalog_log | default (ternary "redis" "file" $redis) }}
{{- end }}

{{- /* Pods without autoscaling. */}}
{{- define "recserve.replicas" -}}
{{- .Values.replicas | default (ternary 1 2 (eq (include "recserve.catalogLog" .) "file")) }}
{{- end }}

{{- define "recserve.serviceAccount" -}}
{{- .Values.serviceAccount.existing | default (include "recserve.name" .) }}
{{- end }}

{{- /* Longest time in seconds that the server takes from SIGTERM to its exit, rounded up. */}}
{{- define "recserve.drainSeconds" -}}
{{- ceil (addf .Values.config.drain_delay_s .Values.config.drain_timeout_s 5) | int }}
{{- end }}
