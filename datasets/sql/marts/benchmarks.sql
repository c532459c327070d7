-- benchmarks: the held-out problems, no question in two of them.
-- Grain: one row per problem_id.
--   benchmark   varchar  name of the benchmark
--   problem_id  varchar  first 16 hexadecimal digits of the SHA-256 of the normalised question
--   question    varchar  as it was read
--   answer      varchar  gold answer
--   family      varchar  kind of problem
--   source      varchar  where it stands in the recipe, and what it is
--   row_number  bigint   1 for the first row of the source
--   row_id      varchar  the source's own name for the row; null without one
--   answer_type varchar  how answers are graded (stages/rewards/tasks.py)
--   grading     varchar  what that needs beside the answer, a JSON object; null for nothing
--   trace       varchar  worked chain of thought; null without one
--   scale       bigint   length of the chain a solver needs; 0 when unknown
--   position    bigint   order within the benchmark; families take turns
with final as (
    select benchmark, problem_id, question, answer, family, source, row_number, row_id, answer_type, grading, trace, scale, position
    from int_benchmark_problems
)

select * from final
