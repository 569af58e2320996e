{{- define "moeserve.containerSecurity" -}}
allowPrivilegeEscalation: false
capabilities:
  drop: [ALL]
privileged: false
readOnlyRootFilesystem: true
{{- end }}

{{- define "moeserve.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{/* The arguments: "path" of a probe, "failures" and "root". */}}
{{- define "moeserve.probe" -}}
httpGet:
  path: {{ .path }}
  port: http
  scheme: {{ include "moeserve.scheme" .root }}
periodSeconds: {{ .root.Values.probes.periodSeconds }}
timeoutSeconds: {{ .root.Values.probes.timeoutSeconds }}
failureThreshold: {{ .failures }}
{{- end }}

{{/* The context for a pod of a LeaderWorkerSet. The arguments: "root", and "role": leader or worker.
Workers have no ports for clients, so they need no certificates. */}}
{{- define "moeserve.role" -}}
{{- $values := deepCopy .root.Values }}
{{- if eq .role "worker" }}
{{- $_ := set $values "tls" (dict "existingSecret" "" "clientCa" (dict "existingSecret" "")) }}
{{- end }}
{{- dict "role" .role "Values" $values "Chart" (dict "Name" .root.Chart.Name "Version" .root.Chart.Version "AppVersion" .root.Chart.AppVersion) "Release" (dict "Name" .root.Release.Name "Namespace" .root.Release.Namespace "Service" .root.Release.Service) | toJson }}
{{- end }}

{{/* What describes the pod is in the environment, where `moeserve health` finds it, too. */}}
{{- define "moeserve.env" -}}
- name: MOESERVE_HTTP
  value: {{ printf "%s:%d" .Values.listenAddress (int .Values.ports.http) | quote }}
- name: MOESERVE_GRPC
  value: {{ printf "%s:%d" .Values.listenAddress (int .Values.ports.grpc) | quote }}
{{- if .Values.tls.existingSecret }}
- name: MOESERVE_TLS_CERT
  value: /etc/moeserve/tls/tls.crt
- name: MOESERVE_TLS_KEY
  value: /etc/moeserve/tls/tls.key
{{- end }}
{{- if .Values.tls.clientCa.existingSecret }}
- name: MOESERVE_TLS_CLIENT_CA
  value: /etc/moeserve/client-ca/{{ .Values.tls.clientCa.key }}
{{- end }}
{{- if .Values.tracing.headersSecret.name }}
- name: MOESERVE_OTLP_HEADERS
  valueFrom:
    secretKeyRef:
      name: {{ .Values.tracing.headersSecret.name }}
      key: {{ .Values.tracing.headersSecret.key }}
{{- end }}
{{- if not (hasKey .Values.config "threads") }}
# The limit of CPUs, rounded up; without a limit, the node's CPUs.
- name: MOESERVE_CPUS
  valueFrom:
    resourceFieldRef:
      containerName: server
      resource: limits.cpu
      divisor: "1"
{{- end }}
{{- if and .role .Values.extraEnv }}
# Ranks in workers get them from the leader.
- name: MOESERVE_RANKS_EXPORT
  value: {{ range $i, $variable := .Values.extraEnv }}{{ if $i }} {{ end }}{{ $variable.name }}{{ end }}
{{- end }}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Secrets and ConfigMaps are mounted as folders, because files of a subPath never change. */}}
{{- define "moeserve.mounts" -}}
- name: config
  mountPath: /etc/moeserve/config
  readOnly: true
- name: models
  mountPath: /models
  readOnly: {{ .Values.models.readOnly }}
{{- if .Values.apiKeys.existingSecret }}
- name: keys
  mountPath: /etc/moeserve/keys
  readOnly: true
{{- end }}
{{- if .Values.tls.existingSecret }}
- name: tls
  mountPath: /etc/moeserve/tls
  readOnly: true
{{- end }}
{{- if .Values.tls.clientCa.existingSecret }}
- name: client-ca
  mountPath: /etc/moeserve/client-ca
  readOnly: true
{{- end }}
{{- if .role }}
- name: ssh
  mountPath: /etc/moeserve/ssh
  readOnly: true
- name: shared-memory
  mountPath: /dev/shm
{{- end }}
{{- with .Values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "moeserve.volumes" -}}
- name: config
  configMap:
    name: {{ include "moeserve.fullname" . }}
{{- if not .Values.models.claimPerReplica.enabled }}
- name: models
  {{- include "moeserve.modelVolume" . | nindent 2 }}
{{- end }}
{{- if .Values.apiKeys.existingSecret }}
- name: keys
  secret:
    secretName: {{ .Values.apiKeys.existingSecret }}
    defaultMode: 0440
{{- end }}
{{- if .Values.tls.existingSecret }}
- name: tls
  secret:
    secretName: {{ .Values.tls.existingSecret }}
    defaultMode: 0440
{{- end }}
{{- if .Values.tls.clientCa.existingSecret }}
- name: client-ca
  secret:
    secretName: {{ .Values.tls.clientCa.existingSecret }}
    defaultMode: 0440
    items:
    - key: {{ .Values.tls.clientCa.key }}
      path: {{ .Values.tls.clientCa.key }}
{{- end }}
{{- if .role }}
- name: ssh
  secret:
    secretName: {{ .Values.ranks.sshKeysSecret }}
    defaultMode: 0440
    items:
    - key: ssh-privatekey
      path: ssh-privatekey
- name: shared-memory
  emptyDir:
    medium: Memory
    sizeLimit: {{ .Values.ranks.sharedMemory }}
{{- end }}
{{- with .Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* What only a pod has that serves: arguments, environment, ports, probes, hooks. */}}
{{- define "moeserve.serving" -}}
args:
- serve
- --config
- /etc/moeserve/config/moeserve.yaml
{{- if not (hasKey .Values.config "threads") }}
- --threads
- $(MOESERVE_CPUS)
{{- end }}
env:
{{- include "moeserve.env" . | nindent 0 }}
ports:
- name: http
  containerPort: {{ .Values.ports.http }}
- name: grpc
  containerPort: {{ .Values.ports.grpc }}
startupProbe:
  {{- $failures := div (add .Values.probes.startupSeconds .Values.probes.periodSeconds -1) .Values.probes.periodSeconds }}
  {{- include "moeserve.probe" (dict "root" . "path" "/health/ready" "failures" $failures) | nindent 2 }}
readinessProbe:
  {{- $failures := int .Values.probes.readinessFailures }}
  {{- if .role }}
  # A pod gets no more requests before it is restarted.
  {{- $failures = min $failures (max 1 (sub .Values.ranks.livenessFailures 1)) }}
  {{- end }}
  {{- include "moeserve.probe" (dict "root" . "path" "/health/ready" "failures" $failures) | nindent 2 }}
livenessProbe:
  {{- if .role }}
  {{- include "moeserve.probe" (dict "root" . "path" "/health/live" "failures" .Values.ranks.livenessFailures) | nindent 2 }}
  # A leader without its ranks has nothing to drain, and mpirun may wait for a lost machine for ever.
  terminationGracePeriodSeconds: {{ add .Values.preStopSleepSeconds 5 }}
  {{- else }}
  {{- include "moeserve.probe" (dict "root" . "path" "/health/live" "failures" .Values.probes.livenessFailures) | nindent 2 }}
  {{- end }}
{{- if gt (int .Values.preStopSleepSeconds) 0 }}
lifecycle:
  preStop:
    sleep:
      seconds: {{ .Values.preStopSleepSeconds }}
{{- end }}
{{- end }}

{{/* What a worker has instead: sshd, by which the leader starts its rank. If it ends, so does the
container. */}}
{{- define "moeserve.working" -}}
ports:
- name: ssh
  containerPort: 2222
readinessProbe:
  tcpSocket:
    port: ssh
  periodSeconds: {{ .Values.probes.periodSeconds }}
  timeoutSeconds: {{ .Values.probes.timeoutSeconds }}
  failureThreshold: {{ .Values.probes.readinessFailures }}
{{- end }}

{{- define "moeserve.container" -}}
name: server
image: {{ include "moeserve.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{- with .role }}
command:
- /usr/local/lib/moeserve/ranks/{{ . }}.sh
{{- end }}
{{ include (ternary "moeserve.working" "moeserve.serving" (eq (default "" .role) "worker")) . | trim }}
{{- $resources := deepCopy .Values.resources }}
{{- if gt (int .Values.gpu.count) 0 }}
{{- $limits := default (dict) (get $resources "limits") }}
{{- $_ := set $limits .Values.gpu.resource .Values.gpu.count }}
{{- $_ := set $resources "limits" $limits }}
{{- end }}
resources:
  {{- toYaml $resources | nindent 2 }}
securityContext:
  {{- include "moeserve.containerSecurity" . | nindent 2 }}
volumeMounts:
{{- include "moeserve.mounts" . | nindent 0 }}
{{- end }}

{{- define "moeserve.spread" -}}
{{- if .Values.topologySpreadConstraints }}
{{- toYaml .Values.topologySpreadConstraints }}
{{- else }}
{{- /* Workers should be near their leader, so they are not spread over zones. */}}
{{- range ternary (list "kubernetes.io/hostname") (list "topology.kubernetes.io/zone" "kubernetes.io/hostname") (eq (default "" .role) "worker") }}
- topologyKey: {{ . }}
  maxSkew: 1
  whenUnsatisfiable: ScheduleAnyway
  labelSelector:
    matchLabels:
      {{- include "moeserve.selector" $ | nindent 6 }}
{{- end }}
{{- end }}
{{- end }}

{{- define "moeserve.podTemplate" -}}
metadata:
  labels:
    {{- include "moeserve.selector" . | nindent 4 }}
    app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
    {{- with .Values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    # A changed configuration file restarts the pods; keys and certificates are read again instead.
    checksum/config: {{ printf "%s\n%s" (include "moeserve.config" .) .Values.chatTemplate | sha256sum }}
    {{- with .Values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ include "moeserve.serviceAccount" . }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ include "moeserve.gracePeriod" . }}
  securityContext:
    {{- include "moeserve.podSecurity" . | nindent 4 }}
  {{- with .Values.imagePullSecrets }}
  imagePullSecrets:
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- if .Values.models.fill.enabled }}
  initContainers:
  - name: fill-models
    image: {{ .Values.models.fill.image }}
    imagePullPolicy: {{ .Values.image.pullPolicy }}
    {{- range $field := list "command" "args" "env" }}
    {{- with get $.Values.models.fill $field }}
    {{ $field }}:
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- end }}
    securityContext:
      {{- include "moeserve.containerSecurity" . | nindent 6 }}
    volumeMounts:
    - name: models
      mountPath: /models
  {{- end }}
  containers:
  - {{ include "moeserve.container" . | nindent 4 | trim }}
  volumes:
  {{- include "moeserve.volumes" . | nindent 2 }}
  topologySpreadConstraints:
  {{- include "moeserve.spread" . | trim | nindent 2 }}
  {{- with .Values.gpu.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with .Values.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with .Values.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.tolerations }}
  tolerations:
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- with .Values.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
