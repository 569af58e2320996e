{{- define "moeserve.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 50 | trimSuffix "-" }}
{{- end }}

{{/* The name of all objects. Suffixes for further objects fit into the 63 characters of a label. */}}
{{- define "moeserve.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" }}
{{- else if contains (include "moeserve.name" .) .Release.Name }}
{{- .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "moeserve.name" .) | trunc 50 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{/* The labels of the pods that serve, or of workers in the context of "moeserve.role". */}}
{{- define "moeserve.selector" -}}
app.kubernetes.io/name: {{ include "moeserve.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: {{ ternary "worker" "server" (eq (default "" .role) "worker") }}
{{- end }}

{{- define "moeserve.labels" -}}
{{ include "moeserve.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "moeserve.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ default (ternary (printf "%s-ranks" .Chart.AppVersion) .Chart.AppVersion .Values.ranks.enabled) .Values.image.tag }}
{{- end }}
{{- end }}

{{- define "moeserve.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{ default (include "moeserve.fullname" .) .Values.serviceAccount.name }}
{{- else -}}
{{ default "default" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- define "moeserve.kind" -}}
{{- if .Values.ranks.enabled -}}
LeaderWorkerSet
{{- else -}}
{{ ternary "StatefulSet" "Deployment" .Values.models.claimPerReplica.enabled }}
{{- end }}
{{- end }}

{{- define "moeserve.workloadApi" -}}
{{ ternary "leaderworkerset.x-k8s.io/v1" "apps/v1" .Values.ranks.enabled }}
{{- end }}

{{/* The largest number of groups of a LeaderWorkerSet, with those of a rolling update. */}}
{{- define "moeserve.groups" -}}
{{- $groups := int (ternary .Values.autoscaling.maxReplicas .Values.replicas .Values.autoscaling.enabled) }}
{{- $surge := .Values.rollingUpdate.maxSurge }}
{{- if kindIs "string" $surge }}
{{- $surge = div (add (mul $groups (trimSuffix "%" $surge | int)) 99) 100 }}
{{- end }}
{{- add $groups (int $surge) }}
{{- end }}

{{- define "moeserve.scheme" -}}
{{ ternary "HTTPS" "HTTP" (not (empty .Values.tls.existingSecret)) }}
{{- end }}

{{/* Seconds from the end of a pod's readiness until it is killed: the hook, the drain, five seconds
for readers and ten for an engine that is stuck, and five to spare. */}}
{{- define "moeserve.gracePeriod" -}}
{{ add .Values.preStopSleepSeconds .Values.drainTimeout 20 }}
{{- end }}

{{/* The source of the models' volume, without the sources that are null. */}}
{{- define "moeserve.modelVolume" -}}
{{- $volume := dict }}
{{- range $kind, $source := .Values.models.volume }}
{{- if not (kindIs "invalid" $source) }}
{{- $_ := set $volume $kind $source }}
{{- end }}
{{- end }}
{{- toYaml $volume }}
{{- end }}

{{/* The configuration file: options of `moeserve serve`. */}}
{{- define "moeserve.config" -}}
{{- $config := deepCopy .Values.config }}
{{- $models := list }}
{{- range .Values.models.served }}
{{- $models = append $models (printf "%s=%s" .name .path) }}
{{- end }}
{{- $_ := set $config "model" $models }}
{{- $_ := set $config "drain-timeout" .Values.drainTimeout }}
{{- if .Values.apiKeys.existingSecret }}
{{- $_ := set $config "api-key-file" (printf "/etc/moeserve/keys/%s" .Values.apiKeys.key) }}
{{- end }}
{{- if .Values.ranks.enabled }}
{{- $_ := set $config "ranks" "mpi" }}
{{- end }}
{{- if .Values.allowOpen }}
{{- $_ := set $config "allow-open" true }}
{{- end }}
{{- if .Values.chatTemplate }}
{{- $_ := set $config "chat-template" "/etc/moeserve/config/chat_template.jinja" }}
{{- end }}
{{- if .Values.tracing.endpoint }}
{{- $_ := set $config "otlp-endpoint" .Values.tracing.endpoint }}
{{- end }}
{{- if gt (int .Values.gpu.count) 0 }}
{{- $_ := set $config "device" "cuda" }}
{{- end }}
{{- if .Values.gateway.enabled }}
{{- if not (hasKey $config "max-connections-per-address") }}
{{- $_ := set $config "max-connections-per-address" 0 }}
{{- end }}
{{- end }}
{{- if .Values.inferencePool.enabled }}
{{- if not (hasKey $config "metrics-compat") }}
{{- $_ := set $config "metrics-compat" "vllm" }}
{{- end }}
{{- end }}
{{- toYaml $config }}
{{- end }}

{{/* Refuses combinations of values that render to objects that do not work. */}}
{{- define "moeserve.check" -}}
{{- if not (or .Values.apiKeys.existingSecret .Values.tls.clientCa.existingSecret .Values.allowOpen) }}
{{- fail "give apiKeys.existingSecret or tls.clientCa.existingSecret, or allowOpen=true to serve everybody who reaches the Service" }}
{{- end }}
{{- if and .Values.tls.clientCa.existingSecret (not .Values.tls.existingSecret) }}
{{- fail "tls.clientCa.existingSecret needs tls.existingSecret" }}
{{- end }}
{{- if eq (int .Values.ports.http) (int .Values.ports.grpc) }}
{{- fail "ports.http and ports.grpc must differ" }}
{{- end }}
{{- $sources := keys (include "moeserve.modelVolume" . | fromYaml) | sortAlpha }}
{{- if and (not .Values.models.claimPerReplica.enabled) (ne (len $sources) 1) }}
{{- fail (printf "models.volume: expected one source, found %d (%s); set the others to null" (len $sources) (join ", " $sources)) }}
{{- end }}
{{- if and .Values.models.fill.enabled (not .Values.models.fill.image) }}
{{- fail "models.fill.image is missing" }}
{{- end }}
{{- if .Values.gateway.enabled }}
{{- if not .Values.gateway.parentRefs }}
{{- fail "gateway.parentRefs is empty" }}
{{- end }}
{{- if .Values.gateway.grpc.enabled }}
{{- if or (not .Values.gateway.http.hostnames) (not .Values.gateway.grpc.hostnames) }}
{{- fail "gateway.http.hostnames and gateway.grpc.hostnames: give both, as a listener takes only one kind of route for a host name" }}
{{- end }}
{{- range .Values.gateway.grpc.hostnames }}
{{- if has . $.Values.gateway.http.hostnames }}
{{- fail (printf "gateway: %s is a host name of both HTTP and gRPC" .) }}
{{- end }}
{{- end }}
{{- end }}
{{- if and .Values.tls.existingSecret (not (and .Values.gateway.backendTls.hostname .Values.gateway.backendTls.caConfigMap)) }}
{{- fail "gateway with TLS in the pods: give gateway.backendTls.hostname and gateway.backendTls.caConfigMap" }}
{{- end }}
{{- end }}
{{- if and .Values.inferencePool.enabled (not .Values.inferencePool.endpointPicker.service) }}
{{- fail "inferencePool.endpointPicker.service is missing" }}
{{- end }}
{{- if and .Values.inferencePool.enabled .Values.tls.existingSecret }}
{{- fail "inferencePool: endpoint pickers reach the pods without TLS; terminate TLS at the Gateway" }}
{{- end }}
{{- if .Values.ranks.enabled }}
{{- if not .Values.ranks.sshKeysSecret }}
{{- fail "ranks.sshKeysSecret is missing" }}
{{- end }}
{{- if ne (len .Values.models.served) 1 }}
{{- fail "ranks: several pods serve one model; models.served has more" }}
{{- end }}
{{- if gt (int .Values.gpu.count) 0 }}
{{- fail "ranks: only CPUs compute a model together; gpu.count must be 0" }}
{{- end }}
{{- if gt (len (include "moeserve.fullname" .)) 44 }}
{{- fail "ranks: names of pods get too long for labels; fullnameOverride must have at most 44 characters" }}
{{- end }}
{{- if and .Values.networkPolicy.enabled (gt (include "moeserve.groups" . | int) 200) }}
{{- fail "ranks: a release has at most 200 groups, of which each has a network policy" }}
{{- end }}
{{- end }}
{{- if and .Values.autoscaling.enabled (gt (int .Values.autoscaling.minReplicas) (int .Values.autoscaling.maxReplicas)) }}
{{- fail "autoscaling.minReplicas exceeds autoscaling.maxReplicas" }}
{{- end }}
{{- end }}
